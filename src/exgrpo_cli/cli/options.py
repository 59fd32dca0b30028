"""Options that several commands share, and what commands do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.progress import to_stderr
from exgrpo_cli.recipe import Recipe, differences, load_recipe, to_toml
from exgrpo_cli.rundir import RunDir, infer_step

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Run directory; or give each path by option.")
]


RecipeOption = Annotated[
    Path | None,
    typer.Option("--recipe", "-r", help="Recipe (TOML); default RUN/recipe.toml.", metavar="FILE"),
]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", help="Override a recipe key; may be repeated.", metavar="KEY=VALUE"
    ),
]


StepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="The step; default the latest that is due.")
]


ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard", help="Do part of the work; default from SLURM_ARRAY_TASK_ID.", metavar="I/N"
    ),
]


ForceOption = Annotated[bool, typer.Option("--force", help="Make again what is there.")]


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")]


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved settings (TOML, or --json); stop.")
]


PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", help="Model folder or adapter; default RUN's policy of the step."),
]


ProblemsOption = Annotated[
    Path | None, typer.Option("--problems", help="Problems table; default RUN/problems.parquet.")
]


RolloutsOption = Annotated[
    Path | None, typer.Option("--rollouts", help="Rollouts: a folder of parts, or a file.")
]


VerdictsOption = Annotated[
    Path | None, typer.Option("--verdicts", help="Verdicts: a folder of parts, or a file.")
]


ScoresOption = Annotated[
    Path | None, typer.Option("--scores", help="Scores: a folder of parts, or a file.")
]


EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="auto, vllm, transformers or server.", metavar="ENGINE"),
]


UrlOption = Annotated[
    str | None, typer.Option("--url", help="A running vllm serve, for --engine server.")
]


ModelOption = Annotated[
    str | None, typer.Option("--model", help="Initial policy: a folder or a hub name.")
]


TrainingProblemsOption = Annotated[
    Path | None, typer.Option("--problems", help="Problems to import, in any known format.")
]


SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of all sampling.")]


SamplesOption = Annotated[int | None, typer.Option("--samples", "-k", min=1, help="K a question.")]


TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature.")
]


MaxNewTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Maximum response length.")
]


_SHARED = ("seed", "rollout.temperature", "rollout.samples", "rollout.max_new_tokens")


def resolve_settings(
    run: Path | None,
    recipe: Path | None,
    sets: list[str] | None,
    dry_run: bool = False,
    as_json: bool = False,
    *,
    stage: bool = False,
    **flags: Any,
) -> Recipe:
    """The command's recipe: --recipe, else RUN/recipe.toml, else defaults; then the flags.

    Flags are named ``section__key``. ``stage`` is for the stages of a run, which must agree on how
    rollouts are sampled.

    Raises:
        InputError: see :func:`exgrpo_cli.recipe.load_recipe`; a stage's sampling is not the run's.
    """
    path = recipe
    if path is None and run is not None and RunDir(run).recipe.exists():
        path = RunDir(run).recipe
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    settings = load_recipe(path, sets or (), dotted)
    if stage and run is not None and RunDir(run).recipe.exists():
        for key, (kept, given) in differences(load_recipe(RunDir(run).recipe), settings).items():
            if key in _SHARED:
                raise InputError(
                    f"{key} = {given!r} differs from {RunDir(run).recipe} ({kept!r}), which the"
                    f" other stages go by; change it there: exgrpo init {run} --set {key}={given}"
                )
    if dry_run:
        if as_json:
            print_result(settings.model_dump(mode="json"), as_json)
        else:
            print(to_toml(settings), end="")
        raise typer.Exit
    return settings


def open_run(run: Path | None, **given: Path | None) -> RunDir:
    """The run directory with explicit paths in place of its own.

    Raises:
        InputError: the directory does not exist.
    """
    if run is not None and not run.is_dir():
        raise InputError(
            f"{run}: no such run directory; start one with: exgrpo run {run} -r RECIPE"
        )
    return RunDir(run or Path(), {kind: path for kind, path in given.items() if path is not None})


def need(run: Path | None, **options: object) -> None:
    """Without a run directory, these options must be given.

    Raises:
        InputError: naming what is missing.
    """
    missing = [f"--{name}" for name, value in options.items() if value is None]
    if run is None and missing:
        raise InputError(f"give a run directory, or {' and '.join(missing)}")


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """The result on stdout: JSON, or a line for each entry."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, default=str))
        return
    for name, value in result.items():
        shown = f"{value or 0.0:g}" if isinstance(value, float) else value  # never -0
        print(f"{name}: {shown}")


def due_step(place: RunDir, step: int | None, kind: str, given: Path | None, mend: str) -> int:
    """The step of a stage: as told; 0 for loose files; else the latest that has its input.

    Raises:
        InputError: the step has no such input yet.
    """
    if given is not None:
        return step or 0
    if step is None:
        return infer_step(place, kind, mend)
    if step not in place.steps(kind):
        what = {"curated": "curated batch"}.get(kind, kind)
        raise InputError(f"{place.root}: step {step} has no {what} yet; {mend} --step {step}")
    return step


def is_over(place: RunDir, step: int | None, as_json: bool) -> bool:
    """Whether every question is retired before this step; then that is the command's result, so
    that what has sent stages ahead (make, SLURM) ends in peace."""
    from exgrpo_cli.experience.plan import all_retired

    if step is None or not all_retired(place, step):
        return False
    if is_first_process():
        to_stderr(f"step {step}: every question is retired; there is nothing left to do")
        print_result({"step": step, "finished": True}, as_json)
    return True


def name_of_policy(policy: str | None) -> str | None:
    """A given policy as it stands in tables: a folder by its plain path."""
    return str(Path(policy)) if policy is not None and Path(policy).is_dir() else policy
