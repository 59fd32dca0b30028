"""Options that several commands share, and what commands do with them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from exgrpo_cli.cli.completion import complete_key, complete_recipe, complete_run
from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.progress import to_stderr
from exgrpo_cli.terminal import harmless

if TYPE_CHECKING:  # settings take half a second to import
    from exgrpo_cli.recipe import Recipe
    from exgrpo_cli.rundir import RunDir
    from exgrpo_cli.step import Result, Step

RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Run directory; or give each path by option.",
        autocompletion=complete_run,
    ),
]
NewRun = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Run directory, made if needed.", autocompletion=complete_run
    ),
]
OwnRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory.", autocompletion=complete_run)
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", min=0, metavar="N", help="The step; default the latest that is due."),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard", help="Do part of the work; default from SLURM_ARRAY_TASK_ID.", metavar="I/N"
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Make again what is there.")]
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
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="OTHER",
        help="Go on from a step of another run: its history is linked.",
        autocompletion=complete_run,
    ),
]
FromStepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="Which step of --from OTHER.")
]
FreshOptimizerOption = Annotated[
    bool, typer.Option("--fresh-optimizer", help="Leave OTHER's optimizer state behind.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of all sampling.")
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", "-k", min=1, metavar="N", help="K a question.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0, metavar="X", help="Sampling temperature.")
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, metavar="N", help="Maximum response length."),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        "-r",
        help="Recipe (TOML); default RUN/recipe.toml.",
        metavar="FILE",
        autocompletion=complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Override a recipe key; may be repeated.",
        metavar="KEY=VALUE",
        autocompletion=complete_key,
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved settings (TOML, or --json); stop.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")]


@dataclass(frozen=True)
class Shared:
    """The options that commands with settings share: ``--recipe --set --dry-run --json``."""

    recipe: RecipeOption = None
    sets: SetOption = None
    dry_run: DryRunOption = False
    as_json: JsonOption = False

    def settings(self, run: Path | None, *, stage: bool = False, **flags: Any) -> Recipe:
        """The command's recipe: --recipe, else RUN/recipe.toml, else defaults; then the flags.

        With ``--dry-run`` it is printed, and that is all.

        Args:
            stage: whether the command is a stage, which must sample as the run's others do.
            **flags: named ``section__key``; None where not given.
        """
        from exgrpo_cli.recipe import SAMPLED_BY, differences, load_recipe, to_toml
        from exgrpo_cli.rundir import RunDir

        own = None if run is None else RunDir(run).own_recipe(needed=self.recipe is None)
        dotted = {name.replace("__", "."): value for name, value in flags.items()}
        settings = load_recipe(self.recipe or own, self.sets or (), dotted)
        if stage and own is not None:
            for key, (kept, given) in differences(load_recipe(own), settings).items():
                if key in (*SAMPLED_BY, "rollout.samples"):
                    raise InputError(
                        f"{key} = {given!r} differs from {own} ({kept!r}), which the other stages"
                        f" go by; change it there: exgrpo init {run} --set {key}={given}"
                    )
        if flags.get("rollout__url") and settings.rollout.engine != "server":
            raise InputError("--url: is the address of a vllm serve; give --engine server with it")
        if self.dry_run:
            if self.as_json:
                print_result(settings.model_dump(mode="json"), self.as_json)
            else:
                print(to_toml(settings), end="")
            raise typer.Exit
        return settings

    def print(self, step: Step, result: Result, **more: Any) -> None:
        """What a stage did, on stdout; of several processes the first speaks."""
        if is_first_process():
            print_result({"step": step.number, **more, **result.as_dict()}, self.as_json)


def with_shared(function: Callable[..., None]) -> Callable[..., None]:
    """The options of :class:`Shared` in the place of the parameter ``shared``, where there is one.

    Typer reads a command's options from its signature.
    """
    signature = inspect.signature(function)
    if "shared" not in signature.parameters:
        return function
    hints = get_type_hints(function, include_extras=True)
    common = get_type_hints(Shared, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        parameter.replace(annotation=hints[name], kind=keyword)
        for name, parameter in signature.parameters.items()
        if name != "shared"
    ]
    options += [
        inspect.Parameter(one.name, keyword, default=one.default, annotation=common[one.name])
        for one in fields(Shared)
    ]

    def command(**values: Any) -> None:
        shared = Shared(**{name: values.pop(name) for name in common})
        function(**values, shared=shared)

    command.__name__ = function.__name__
    command.__annotations__ = {one.name: one.annotation for one in options}
    described: Any = command
    described.__signature__ = signature.replace(parameters=options)
    return command


def open_run(run: Path) -> RunDir:
    """The run directory of a command."""
    from exgrpo_cli.rundir import RunDir
    from exgrpo_cli.runs.state import check_is_run

    if run.is_file():
        raise InputError(f"{run}: is a file; a run is a directory")
    if not run.is_dir():
        raise InputError(
            f"{run}: no such run directory; start one with: exgrpo run {run} -r RECIPE"
        )
    place = RunDir(run)
    check_is_run(place)
    return place


def need(**options: object) -> None:
    """Without a run directory, these options must be given."""
    missing = [f"--{name}" for name, value in options.items() if value is None]
    if missing:
        raise InputError(f"give a run directory, or {' and '.join(missing)}")


def open_step(
    shared: Shared,
    run: Path | None,
    number: int | None,
    *,
    kind: str,
    needs: Mapping[str, object],
    source: Path | None = None,
    policy: str | None = None,
    **given: Path | None,
) -> Step:
    """The step that a stage is to do: of a run as told, else the latest that has its input.

    Where every question is retired before it, that is the command's result, and the command ends
    here in peace: make or SLURM may have sent it ahead.

    Args:
        kind: of what the stage reads: ``policy``, ``rollouts`` or ``curated``.
        needs: options that loose files need, by name.
        source: the input itself, where it is given: then the step is 0 unless it is told.
    """
    from exgrpo_cli.experience.plan import all_retired
    from exgrpo_cli.step import Step

    if run is None:
        need(**needs)
        return Step.of(None, number or 0, policy=policy, **given)
    place = open_run(run)
    if source is None:
        if kind == "policy" and number is None:
            number = _latest_to_sample(place)
        if number is not None and all_retired(place, number):
            if is_first_process():
                to_stderr(f"step {number}: every question is retired; there is nothing left to do")
                print_result({"step": number, "finished": True}, shared.as_json)
            raise typer.Exit
        if kind != "policy":
            number = _due(place, number, kind, loose=policy is not None)
    return Step.of(place, number or 0, policy=policy, **given)


def _latest_to_sample(place: RunDir) -> int:
    """The latest step that is planned and has its policy; without a lag the newest policy's."""
    from exgrpo_cli.recipe import Recipe, load_recipe

    own = place.own_recipe(needed=False)
    lag = (load_recipe(own) if own else Recipe()).loop.lag
    trained = max(place.steps("policy"), default=0)
    return max(trained, min(max(place.steps("plan"), default=0), trained + lag))


def _due(place: RunDir, number: int | None, kind: str, *, loose: bool) -> int:
    """The step as told, refused where it has no input; else the latest that has it."""
    what, stage = ("rollouts", "rollout") if kind == "rollouts" else ("curated batch", "curate")
    mend = f"run: exgrpo {stage} {place.root}"
    steps = place.steps(kind)
    if number is not None:
        if number not in steps:
            raise InputError(
                f"{place.root}: step {number} has no {what} yet; {mend} --step {number}"
            )
        return number
    if not steps:
        raise InputError(f"{place.root}: no {what} yet; {mend}")
    if kind == "curated" and not loose:  # with a lag before the policy is there to be trained
        return max((n for n in steps if n == 0 or place.policy(n).is_dir()), default=steps[-1])
    return steps[-1]


def print_result(result: Mapping[str, Any], as_json: bool) -> None:
    """A result on stdout: JSON, or a line for each entry that has a value."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, default=str))
        return
    for name, value in result.items():
        if value is not None and value is not False:
            print(f"{name}: {_words(value)}")


def _words(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value or 0.0:g}"  # never -0
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    return harmless(str(value))
