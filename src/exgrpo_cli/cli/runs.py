"""The commands about whole runs: init, run, evaluate and merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exgrpo_cli.cli.app import command
from exgrpo_cli.cli.options import (
    EngineOption,
    ForceOption,
    FreshOptimizerOption,
    FromOption,
    FromStepOption,
    MaxNewTokensOption,
    ModelOption,
    NewRun,
    PolicyOption,
    RunArgument,
    SamplesOption,
    SeedOption,
    Shared,
    TemperatureOption,
    TrainingProblemsOption,
    UrlOption,
    need,
    open_run,
    print_result,
)
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import to_stderr

if TYPE_CHECKING:
    from exgrpo_cli.recipe import Recipe
    from exgrpo_cli.rundir import RunDir

PANEL = "Whole runs"


@command(PANEL)
def init(
    shared: Shared,
    run: NewRun,
    model: ModelOption = None,
    problems: TrainingProblemsOption = None,
    seed: SeedOption = None,
    other: FromOption = None,
    step: FromStepOption = None,
    fresh_optimizer: FreshOptimizerOption = False,
) -> None:
    """Start a run directory: resolve the recipe into it and import the problems.

    What run does first; for driving the stages by hand.
    """
    settings = _begin(
        shared,
        run,
        other,
        step,
        fresh_optimizer,
        model__path=model,
        problems__path=None if problems is None else str(problems),
        seed=seed,
    )
    from exgrpo_cli.rundir import RunDir
    from exgrpo_cli.runs.prepare import prepare

    place = RunDir(run)
    with _new_run(place):
        prepare(place, settings, to_stderr)
    print_result({"recipe": str(place.recipe), "problems": str(place.problems)}, shared.as_json)


@command(PANEL)
def run(
    shared: Shared,
    run: NewRun,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Iterations, counted from the start."),
    ] = None,
    engine: EngineOption = None,
    url: UrlOption = None,
    model: ModelOption = None,
    problems: TrainingProblemsOption = None,
    seed: SeedOption = None,
    track: Annotated[
        str | None,
        typer.Option("--track", help="Also send metrics to trackio, wandb or tensorboard."),
    ] = None,
    only: Annotated[
        Literal["sample", "train"] | None,
        typer.Option("--only", help="One side of a run; wait for the files of the other."),
    ] = None,
    other: FromOption = None,
    step: FromStepOption = None,
    fresh_optimizer: FreshOptimizerOption = False,
) -> None:
    """Run ExGRPO: rollout, verify, score, curate and train, again and again.

    Makes the same files as the stages called by hand, and goes on from those that are there.
    With loop.lag sampling and training go on at the same time.
    """
    settings = _begin(
        shared,
        run,
        other,
        step,
        fresh_optimizer,
        loop__steps=steps,
        loop__track=track,
        rollout__engine=engine,
        rollout__url=url,
        model__path=model,
        problems__path=None if problems is None else str(problems),
        seed=seed,
    )
    from exgrpo_cli.inspect.report import write_report
    from exgrpo_cli.metrics import learning_curve
    from exgrpo_cli.rundir import RunDir
    from exgrpo_cli.runs.loop import run as loop

    place = RunDir(run)
    if only is not None:
        _refuse_changes(place, settings)
        with place.locked("curate" if only == "sample" else "train"):
            result = loop(place, settings, only=only, log=to_stderr)
        print_result(result, shared.as_json)
        return
    with _new_run(place):
        result = loop(place, settings, log=to_stderr)
        result["report"] = str(write_report(place))
    curve = learning_curve(place.read_metrics())
    if curve and not shared.as_json:
        print(curve)
    print_result(result, shared.as_json)


@command(PANEL)
def evaluate(
    shared: Shared,
    run: RunArgument = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="RUN's policy of this step; default last."),
    ] = None,
    policy: PolicyOption = None,
    problems: Annotated[
        Path | None, typer.Option("--problems", help="Held-out problems, in any known format.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for rollouts, verdicts and the summary.")
    ] = None,
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    engine: EngineOption = None,
    url: UrlOption = None,
    seed: SeedOption = None,
    force: ForceOption = False,
) -> None:
    """Measure a policy on held-out problems: pass@1 (avg@k) and pass@k by source.

    Intervals are 95% bootstrap intervals over problems. RUN's policy on --problems or the recipe's
    sets; without RUN: --policy on --problems, into --out.
    """
    settings = shared.settings(
        run,
        rollout__engine=engine,
        rollout__url=url,
        evaluate__samples=samples,
        evaluate__temperature=temperature,
        evaluate__max_new_tokens=max_new_tokens,
        seed=seed,
    )
    from exgrpo_cli.runs.evaluations import evaluate_loose, evaluate_sets
    from exgrpo_cli.runs.session import Session

    if run is None:
        need(policy=policy, problems=problems, out=out)
        assert policy is not None
        assert problems is not None
        assert out is not None
        summary = evaluate_loose(policy, problems, out, settings, force=force, log=to_stderr)
        summaries = {problems.stem: summary}
    else:
        place = open_run(run)
        sets_of = {problems.stem: str(problems)} if problems else settings.evaluate.problems
        if not sets_of:
            raise InputError("no problems to evaluate on: give --problems, or evaluate.problems")
        step = max(place.steps("policy"), default=0) if step is None else step
        with Session(place, settings, to_stderr) as session:
            summaries = evaluate_sets(session, step, sets_of, force=force)
    if shared.as_json:
        print_result(summaries, shared.as_json)
        return
    from rich.console import Console
    from rich.markup import escape

    from exgrpo_cli.stages.evaluate import format_table

    for name, summary in summaries.items():
        Console().print(f"[bold]{escape(name)}[/]")
        Console().print(format_table(summary))


@command(PANEL)
def merge(
    shared: Shared,
    source: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Adapter folder, or a run directory.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="The model's folder; for a run RUN/merged/step-…."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="RUN's policy of this step; default last."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model, where it lies elsewhere by now.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Saved weights: float32, bfloat16, float16, or auto, as the base model's.",
        ),
    ] = "auto",
    force: ForceOption = False,
) -> None:
    """Merge a LoRA adapter into its base model: a plain Hugging Face folder, without a GPU.

    Of a run directory: the latest policy, or that of --step.
    """
    from exgrpo_cli.models import is_adapter
    from exgrpo_cli.rundir import RunDir, step_name
    from exgrpo_cli.training.merge import merge as stage

    if not source.is_dir():
        raise InputError(f"{source}: no such adapter folder or run directory")
    run = None if is_adapter(str(source)) else source
    is_run = run is not None and (RunDir(run).recipe.exists() or (run / "policy").is_dir())
    settings = shared.settings(run if is_run else None)
    adapter = source
    if is_run:
        place = RunDir(source)
        step = max(place.steps("policy"), default=0) if step is None else step
        adapter = Path(place.policy_path(step, settings.model.path))
        out = out or source / "merged" / step_name(step)
    elif step is not None:
        raise InputError(f"{source}: --step is for run directories, and this is none")
    if out is None:
        raise InputError(f"{source}: give OUT, the folder for the merged model")
    result = stage(
        adapter, out, base=base, dtype=dtype, settings=settings.model, force=force, log=to_stderr
    )
    print_result(result, shared.as_json)


def _refuse_changes(place: RunDir, settings: Recipe) -> None:
    """One side of a run goes by the recipe that both have."""
    from exgrpo_cli.recipe import differences, load_recipe, with_absolute_paths

    own = place.own_recipe()
    if own is None:
        raise InputError(f"{place.root}: not begun; run: exgrpo init {place.root} --recipe FILE")
    for key, (kept, given) in differences(load_recipe(own), with_absolute_paths(settings)).items():
        raise InputError(
            f"{key} = {given!r} differs from {own} ({kept!r}), which both sides go by; change it"
            f" there: exgrpo init {place.root} --set {key}={given}"
        )


def _begin(
    shared: Shared,
    run: Path,
    other: Path | None,
    step: int | None,
    fresh_optimizer: bool,
    **flags: Any,
) -> Recipe:
    """The command's recipe, and the run that goes on from another one, where that is asked for."""
    if other is None:
        if step is not None or fresh_optimizer:
            raise InputError(
                "--step and --fresh-optimizer say how to go on from another run: --from"
            )
        return shared.settings(run, **flags)
    if step is None:
        raise InputError(f"--from {other}: give the step to go on from: --step N")
    from exgrpo_cli.rundir import RunDir
    from exgrpo_cli.runs.fork import fork

    place = RunDir(run)
    settings = shared.settings(run if place.recipe.exists() else other, **flags)
    return fork(
        place, open_run(other), step, settings, fresh_optimizer=fresh_optimizer, log=to_stderr
    )


@contextmanager
def _new_run(place: RunDir) -> Iterator[None]:
    """Hold a run, made where it is not there; one in which nothing was begun is taken back."""
    if place.root.exists() and not place.root.is_dir():
        raise InputError(f"{place.root}: is a file; a run is a directory")
    fresh = not place.root.exists()
    place.root.mkdir(parents=True, exist_ok=True)
    with place.locked():
        try:
            yield
        finally:  # under the lock: another may have begun here meanwhile
            entries = list(place.root.iterdir())
            if fresh and all(entry.name.startswith(".lock") for entry in entries):
                for entry in entries:
                    entry.unlink()
                place.root.rmdir()
