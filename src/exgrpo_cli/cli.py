"""The command ``exgrpo``: options, help and exit codes. Nothing heavy is imported here."""

from __future__ import annotations

import atexit
import errno
import functools
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, ParamSpec

import typer

from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.progress import is_first_of_machine, is_first_process, processes, to_stderr
from exgrpo_cli.recipe import Recipe, differences, load_recipe, to_toml
from exgrpo_cli.rundir import RunDir, infer_step, step_name

app = typer.Typer(
    name="exgrpo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

P = ParamSpec("P")


def _command(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line and an exit code: 2 bad input, 1 failed, 130 interrupted."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = os.environ.get("EXGRPO_DEBUG") == "1"
        try:
            function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more: end at once, in silence
            _say("interrupted; what was finished is kept, the same command goes on")
            raise SystemExit(130) from None
        except BrokenPipeError:
            _reader_is_gone()
        except InputError as error:
            if debug:
                raise
            _say(str(error))
            raise SystemExit(2) from None
        except StageError as error:
            if debug:
                raise
            _say(str(error))
            raise SystemExit(1) from None
        except OSError as error:
            if debug:
                raise
            where = f"{error.filename}: " if error.filename else ""
            to_stderr(f"exgrpo: {where}{error.strerror or error}")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SystemExit(2 if error.filename and not full else 1) from None
        except Exception as error:
            if debug:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            to_stderr(f"exgrpo: {type(error).__name__}: {reason} (--debug shows the traceback)")
            raise SystemExit(1) from None

    return guarded


def _say(line: str) -> None:
    """An error that every process of a ``torchrun`` has alike, once a machine."""
    if is_first_of_machine():
        to_stderr(f"exgrpo: {line}")


def _reader_is_gone(*_: object) -> NoReturn:
    """End quietly where nobody reads on, as in ``exgrpo show … | head``."""
    _drop_stdout()
    raise SystemExit(0)


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> None:
    """Entry point; ``--debug`` may stand anywhere."""
    from rich.console import Console

    # rich's own exits with 1
    Console.on_broken_pipe = _reader_is_gone  # type: ignore[method-assign, assignment]
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments = [a for a in arguments if a != "--debug"]
        os.environ["EXGRPO_DEBUG"] = "1"
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="exgrpo")
    except SystemExit as end:
        if processes() > 1:
            _leave(end)
        raise
    finally:
        _flush()


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the exit code stays
        _drop_stdout()


def _leave(end: SystemExit) -> NoReturn:
    """End one of torchrun's processes without taking the interpreter apart.

    Gloo's threads outlive ``destroy_process_group`` (torch's caches keep the device mesh). One
    that frees a tensor while the interpreter is taken apart aborts a process that had finished.
    """
    atexit._run_exitfuncs()
    _flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _version(show: bool) -> None:
    if show:
        from exgrpo_cli import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """Train a reasoning model from its own experience (ExGRPO), in stages that speak through files.

    One iteration is [bold]rollout[/], [bold]verify[/], [bold]score[/], [bold]curate[/],
    [bold]train[/], each on a run directory; [bold]run[/] calls them in turn. Every stage goes on
    where it stopped, and skips what is already there.
    """


# --- options that several commands share --------------------------------------------------------

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


def _settings(
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
            _result(settings.model_dump(mode="json"), as_json)
        else:
            print(to_toml(settings), end="")
        raise typer.Exit
    return settings


def _run_dir(run: Path | None, **given: Path | None) -> RunDir:
    """The run directory with explicit paths in place of its own.

    Raises:
        InputError: the directory does not exist.
    """
    if run is not None and not run.is_dir():
        raise InputError(
            f"{run}: no such run directory; start one with: exgrpo run {run} -r RECIPE"
        )
    return RunDir(run or Path(), {kind: path for kind, path in given.items() if path is not None})


def _need(run: Path | None, **options: object) -> None:
    """Without a run directory, these options must be given.

    Raises:
        InputError: naming what is missing.
    """
    missing = [f"--{name}" for name, value in options.items() if value is None]
    if run is None and missing:
        raise InputError(f"give a run directory, or {' and '.join(missing)}")


def _result(result: dict[str, Any], as_json: bool) -> None:
    """The result on stdout: JSON, or a line for each entry."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, default=str))
        return
    for name, value in result.items():
        shown = f"{value or 0.0:g}" if isinstance(value, float) else value  # never -0
        print(f"{name}: {shown}")


# --- the stages -----------------------------------------------------------------------------------


@app.command(rich_help_panel="Stages")
@_command
def rollout(
    run: RunArgument = None,
    step: StepOption = None,
    engine: EngineOption = None,
    url: UrlOption = None,
    policy: PolicyOption = None,
    problems: ProblemsOption = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan table; default RUN/plan/step-….parquet.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the parts; default RUN/rollouts/step-…."),
    ] = None,
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    seed: SeedOption = None,
    shard: ShardOption = None,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sample the planned questions from the current policy, to Parquet.

    Without RUN: every problem of --problems, K samples each, from --policy into --out.
    """
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        rollout__engine=engine,
        rollout__url=url,
        rollout__samples=samples,
        rollout__temperature=temperature,
        rollout__max_new_tokens=max_new_tokens,
        seed=seed,
        stage=True,
    )
    from exgrpo_cli.stages.rollout import ensure_plan
    from exgrpo_cli.stages.rollout import rollout as sample
    from exgrpo_cli.tables import parse_shard

    _need(run, problems=problems, policy=policy, out=out)
    place = _run_dir(run, problems=problems, plan=plan, rollouts=out)
    if step is None:
        step = max(place.steps("policy"), default=0) if run is not None else 0
    if run is not None and plan is None:
        if _is_over(place, step, as_json):
            return
        plan = ensure_plan(place, step, settings, to_stderr)
    if force and run is not None and place.policy(step + 1).is_dir():
        to_stderr(
            f"step {step} is trained already: {place.policy(step + 1)} comes from the rollouts that"
            " are replaced now"
        )
    result = sample(
        problems=place.problems,
        plan=plan,
        out=place.rollouts(step),
        policy=policy or place.policy_path(step, settings.model.path),
        policy_name=_policy_name(policy) or step_name(step),
        step=step,
        recipe=settings,
        shard=parse_shard(shard),
        stale=() if run is None else (place.verdicts(step), place.scores(step)),
        force=force,
        log=to_stderr,
    )
    _result({"step": step, **result}, as_json)


@app.command(rich_help_panel="Stages")
@_command
def verify(
    run: RunArgument = None,
    step: StepOption = None,
    rollouts: RolloutsOption = None,
    problems: ProblemsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder or file; default RUN/verdicts/step-….")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Hard limit for one answer, seconds.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Worker processes; default the cores.")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="Judge all by this one, such as path.py:function."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", help="Only explain one verdict.", metavar="ROLLOUT_ID"),
    ] = None,
    shard: ShardOption = None,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge each rollout's final answer against the gold answer.

    Worker processes with a hard time limit an answer; math by math-verify.
    """
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        verify__timeout=timeout,
        verify__workers=workers,
        stage=True,
    )
    from exgrpo_cli.stages import verify as stage
    from exgrpo_cli.tables import parse_shard

    _need(run, rollouts=rollouts, problems=problems, out=out or explain)
    place = _run_dir(run, rollouts=rollouts, problems=problems, verdicts=out)
    named = re.match(r"s(\d{5,})/", explain or "")
    if named and step is None:
        step = int(named[1])
    if rollouts is None and _is_over(place, step, as_json):
        return
    step = _step(place, step, "rollouts", rollouts, f"run: exgrpo rollout {run}")
    if explain is not None:
        found = stage.explain(place.rollouts(step), place.problems, explain, settings, verifier)
        _result(found, as_json)
        return
    result = stage.verify(
        place.rollouts(step),
        place.problems,
        place.verdicts(step),
        settings,
        shard=parse_shard(shard),
        force=force,
        verifier=verifier,
        log=to_stderr,
    )
    _result(result, as_json)
    stage.refuse_errors(result, place.verdicts(step))


@app.command(rich_help_panel="Stages")
@_command
def score(
    run: RunArgument = None,
    step: StepOption = None,
    policy: PolicyOption = None,
    rollouts: RolloutsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the parts; default RUN/scores/step-….")
    ] = None,
    shard: ShardOption = None,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Exact log-probabilities and entropies of rollouts and replay candidates.

    A forward pass of the current policy. May be left out: the rollouts' own numbers then serve.
    """
    settings = _settings(run, recipe, sets, dry_run, as_json, stage=True)
    from exgrpo_cli.stages.score import score as stage
    from exgrpo_cli.tables import parse_shard

    _need(run, rollouts=rollouts, policy=policy, out=out)
    place = _run_dir(run, rollouts=rollouts, scores=out)
    if rollouts is None and _is_over(place, step, as_json):
        return
    step = _step(place, step, "rollouts", rollouts, f"run: exgrpo rollout {run}")
    result = stage(
        rollouts=place.rollouts(step),
        out=place.scores(step),
        policy=policy or place.policy_path(step, settings.model.path),
        policy_name=_policy_name(policy) or step_name(step),
        step=step,
        recipe=settings,
        run=None if run is None else place,
        shard=parse_shard(shard),
        force=force,
        log=to_stderr,
    )
    _result(result, as_json)


@app.command(rich_help_panel="Stages")
@_command
def curate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: StepOption = None,
    rollouts: RolloutsOption = None,
    verdicts: VerdictsOption = None,
    scores: ScoresOption = None,
    problems: ProblemsOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Derive the tables anew from the whole log.")
    ] = False,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose what is replayed, take in new successes, retire the mastered, plan the next step.

    DuckDB queries over the run's tables; the log of rollouts and verdicts is the truth. Loose
    files (--rollouts, --verdicts, --scores, --problems) are first linked into RUN's log.
    """
    settings = _settings(run, recipe, sets, dry_run, as_json, stage=True)
    from exgrpo_cli.stages.curate import curate as stage

    if rollouts is not None and verdicts is not None:
        from exgrpo_cli.loop import adopt

        step = step or 0
        adopt(
            RunDir(run),
            step,
            rollouts=rollouts,
            verdicts=verdicts,
            scores=scores,
            problems=problems,
        )
    elif (rollouts, verdicts, scores, problems) != (None, None, None, None):
        raise InputError("loose files: give --rollouts and --verdicts together")
    place = _run_dir(run)
    if _is_over(place, step, as_json):
        return
    step = _step(place, step, "rollouts", None, f"run: exgrpo rollout {run}")
    with place.locked():
        result = stage(place, step, settings, rebuild=rebuild, force=force, log=to_stderr)
    _result({"step": step, **result}, as_json)


@app.command(rich_help_panel="Stages")
@_command
def train(
    run: RunArgument = None,
    step: StepOption = None,
    policy: PolicyOption = None,
    rollouts: RolloutsOption = None,
    verdicts: VerdictsOption = None,
    scores: ScoresOption = None,
    curated: Annotated[
        Path | None, typer.Option("--curated", help="Chosen trajectories to replay.")
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option("--trainer", help="Optimizer state to go on from.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The new policy; default RUN/policy/step-….")
    ] = None,
    trainer_out: Annotated[
        Path | None, typer.Option("--trainer-out", help="The new optimizer state.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="AdamW's learning rate.")
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--no-lora", help="Train a LoRA adapter.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")
    ] = None,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Update the policy on the mixed batch of fresh rollouts and replayed successes.

    On several GPUs: torchrun --nproc-per-node N -m exgrpo_cli train RUN
    """
    if trainer is not None and not trainer.is_dir():
        raise InputError(f"{trainer}: no such trainer state")
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        train__learning_rate=learning_rate,
        lora__enabled=lora,
        train__device=device,
        stage=True,
    )
    if run is not None:
        from exgrpo_cli.loop import train_step

        given = {
            "rollouts": rollouts,
            "verdicts": verdicts,
            "scores": scores,
            "curated": curated,
        }
        place = _run_dir(run, **given)
        if curated is None and _is_over(place, step, as_json):
            return
        step = _step(place, step, "curated", curated, f"run: exgrpo curate {run}")
        with place.locked():
            result = train_step(
                place,
                step,
                settings,
                to_stderr,
                policy=policy,
                trainer=trainer,
                out_policy=out,
                out_trainer=trainer_out,
                force=force,
            )
        if is_first_process():
            _result(result, as_json)
        return
    from exgrpo_cli.models import check_policy, check_tokenizer
    from exgrpo_cli.stages.train import train as stage

    _need(run, policy=policy, rollouts=rollouts, verdicts=verdicts, out=out)
    assert policy is not None
    assert rollouts is not None
    assert verdicts is not None
    assert out is not None
    check_policy(policy)
    check_tokenizer(policy)
    result = stage(
        rollouts=rollouts,
        verdicts=verdicts,
        scores=scores,
        curated=curated,
        policy=str(_policy_name(policy)),
        trainer=trainer,
        out_policy=out,
        out_trainer=trainer_out or out.parent / f"{out.name}-trainer",
        step=step or 0,
        recipe=settings,
        replay_started=curated is not None,
        force=force,
        log=to_stderr,
    )
    if is_first_process():
        _result(result, as_json)


@app.command(rich_help_panel="Whole runs")
@_command
def init(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, made if needed.")],
    model: ModelOption = None,
    problems: TrainingProblemsOption = None,
    seed: SeedOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run directory: resolve the recipe into it and import the problems.

    What run does first; for driving the stages by hand.
    """
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        model__path=model,
        problems__path=None if problems is None else str(problems),
        seed=seed,
    )
    from exgrpo_cli.loop import prepare

    place = RunDir(run)
    prepare(place, settings, to_stderr)
    _result({"recipe": str(place.recipe), "problems": str(place.problems)}, as_json)


@app.command(rich_help_panel="Whole runs")
@_command
def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, made if needed.")],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Iterations, counted from the start.")
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
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where each iteration's time went.")
    ] = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run ExGRPO: rollout, verify, score, curate and train, again and again.

    Makes the same files as the stages called by hand, and goes on from those that are there.
    """
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        loop__steps=steps,
        loop__track=track,
        rollout__engine=engine,
        rollout__url=url,
        model__path=model,
        problems__path=None if problems is None else str(problems),
        seed=seed,
    )
    from exgrpo_cli.loop import run_loop
    from exgrpo_cli.report import learning_curve

    place = RunDir(run)
    if run.exists() and not run.is_dir():
        raise InputError(f"{run}: is a file; a run is a directory")
    fresh = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    try:
        with place.locked():
            result = run_loop(place, settings, profile=profile, log=to_stderr)
    finally:
        if fresh:
            _remove_if_unused(run)
    if as_json:
        _result(result, as_json)
        return
    curve = learning_curve(place.read_metrics())
    if curve:
        print(curve)
    if profile:
        from exgrpo_cli.profiling import profile_table

        print(profile_table(place.read_metrics()))
    _result(result, as_json)


@app.command(rich_help_panel="Whole runs")
@_command
def evaluate(
    run: RunArgument = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="RUN's policy of this step; default last.")
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
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a policy on held-out problems: pass@1 (avg@k) and pass@k by source.

    Intervals are 95% bootstrap intervals over problems. RUN's policy on --problems or the recipe's
    sets; without RUN: --policy on --problems, into --out.
    """
    settings = _settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        rollout__engine=engine,
        rollout__url=url,
        evaluate__samples=samples,
        evaluate__temperature=temperature,
        evaluate__max_new_tokens=max_new_tokens,
        seed=seed,
    )
    from exgrpo_cli.loop import evaluate_loose, evaluate_sets

    if run is None:
        _need(run, policy=policy, problems=problems, out=out)
        assert policy is not None
        assert problems is not None
        assert out is not None
        summary = evaluate_loose(policy, problems, out, settings, force=force, log=to_stderr)
        summaries = {problems.stem: summary}
    else:
        place = _run_dir(run)
        sets_of = {problems.stem: str(problems)} if problems else settings.evaluate.problems
        if not sets_of:
            raise InputError("no problems to evaluate on: give --problems, or evaluate.problems")
        step = max(place.steps("policy"), default=0) if step is None else step
        summaries = evaluate_sets(place, step, sets_of, settings, force=force, log=to_stderr)
    if as_json:
        _result(summaries, as_json)
        return
    from rich.console import Console

    from exgrpo_cli.stages.evaluate import format_table

    for summary in summaries.values():
        Console().print(format_table(summary))


@app.command(rich_help_panel="Whole runs")
@_command
def merge(
    source: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Adapter folder, or a run directory.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="The model's folder; for a run RUN/merged/step-…."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="RUN's policy of this step; default last.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model, where it lies elsewhere by now.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Saved weights; auto: as the base model's."),
    ] = "auto",
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a LoRA adapter into its base model: a plain Hugging Face folder, without a GPU.

    Of a run directory: the latest policy, or that of --step.
    """
    from exgrpo_cli.models import is_adapter
    from exgrpo_cli.stages.merge import merge as stage

    if not source.is_dir():
        raise InputError(f"{source}: no such adapter folder or run directory")
    run = None if is_adapter(str(source)) else source
    is_run = run is not None and (RunDir(run).recipe.exists() or (run / "policy").is_dir())
    settings = _settings(run if is_run else None, recipe, sets)
    adapter = source
    if is_run:
        place = _run_dir(run)
        step = max(place.steps("policy"), default=0) if step is None else step
        adapter = Path(place.policy_path(step, settings.model.path))
        out = out or source / "merged" / step_name(step)
    elif step is not None:
        raise InputError(f"{source}: --step is for run directories, and this is none")
    if out is None:
        raise InputError(f"{source}: give OUT, the folder for the merged model")
    result = stage(
        adapter,
        out,
        base=base,
        dtype=dtype,
        settings=settings.model,
        force=force,
        log=to_stderr,
    )
    _result(result, as_json)


# --- around them ----------------------------------------------------------------------------------


@app.command(rich_help_panel="Data and inspection")
@_command
def problems(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSONL, JSON, CSV, Parquet or Arrow; or a folder."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Problems table to write; without it, only check.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="auto, problems, dapo, verl, gpqa, arc, mmlu_pro, mmlu, openr1, deepscaler, math,"
            " olympiadbench, gsm8k, chat, sharegpt or plain.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="FIELD=COLUMN,…",
            help="Where detection fails: question=Problem,answer=Gold; also options, id, source,"
            " verifier.",
        ),
    ] = None,
    skip_bad: Annotated[
        bool | None,
        typer.Option("--skip-bad", help="Leave out rows that cannot be read, and count them."),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="math, choice, exact, numeric, or path.py:function."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--source", help="Name of the set, where rows have none.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first so many problems.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Leave out prompts too long for this model's tokenizer."),
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep rows that ask the same question.")
    ] = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring your own problems into the problems table, and check them.

    Known schemas are detected: verl, DAPO-Math, GSM8K, MATH, OpenR1-Math, DeepScaleR,
    OlympiadBench, ARC, MMLU, MMLU-Pro, GPQA, chats, ShareGPT, plain question and answer.
    """
    named = [pair.partition("=") for pair in re.split(r",(?=\w+=)", columns)] if columns else []
    if not all(field and equals and column for field, equals, column in named):
        raise InputError(f"--columns {columns}: expected FIELD=COLUMN, such as question=Problem")
    settings = _settings(
        None,
        recipe,
        sets,
        problems__format=format_,
        problems__verifier=verifier,
        problems__limit=limit,
        problems__columns={field.strip(): column for field, _, column in named} or None,
        problems__skip_bad=skip_bad,
    )
    from exgrpo_cli.loop import import_into

    report = import_into(
        out, source, settings, policy, to_stderr, name=name, dedupe=not keep_duplicates
    )
    _result(report, as_json)


@app.command(rich_help_panel="Data and inspection")
@_command
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run directory, table or folder.")],
    as_json: JsonOption = False,
) -> None:
    """One screen about a run, or about a table."""
    from exgrpo_cli import show as screens

    if as_json:
        _result(screens.describe(path), as_json)
        return
    from rich.console import Console

    screens.show(path, Console())


@app.command(rich_help_panel="Data and inspection")
@_command
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="This step; default the one at work.")
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option("--tasks", min=1, help="Tasks of your arrays; default one a part."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What of a run is done, missing or being made, and the next command to type.

    For arrays: which shards are missing, and the sbatch line that sends them again.
    """
    from exgrpo_cli import status as stage

    found = stage.describe(_run_dir(run), step)
    if as_json:
        _result(found, as_json)
    else:
        print(stage.format_status(found, tasks))


@app.command(rich_help_panel="Data and inspection")
@_command
def diff(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="The other recipe; default RUN/recipe.toml."),
    ] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """What would have been replayed under another recipe, in numbers, step by step.

    Derives the experience of both recipes (RUN's own, and RECIPE with --set) in memory from RUN's
    log; nothing is written. The rollouts and the policies are the recorded ones: the comparison is
    of what each recipe would plan and replay next, given all that was sampled so far. A question
    that only the other recipe would have sampled has no rollouts, and how training would have gone
    is not known. Candidates that were never scored for a step count with their recorded entropy.
    """
    if recipe is None and not sets:
        raise InputError("nothing to compare with: give another RECIPE, or --set KEY=VALUE")
    place = _run_dir(run)
    if not place.recipe.exists():
        raise InputError(f"{place.recipe}: no such file; the run's own recipe is compared with")
    recorded = _settings(run, None, None)
    other = _settings(run, recipe, sets)
    from exgrpo_cli.stages import diff as stage

    result = stage.diff(place, recorded, other, to_stderr)
    if as_json:
        _result(result, as_json)
        return
    print(stage.format_diff(result))


@app.command(rich_help_panel="Data and inspection")
@_command
def sql(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    command: Annotated[
        str | None,
        typer.Option("--command", "-c", help="The query; default from stdin.", metavar="QUERY"),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a row.")] = False,
) -> None:
    """Ask a run questions in SQL: DuckDB with a view for each of its tables.

    The views are problems, plan, rollouts, verdicts, scores, experience, questions and curated;
    relative paths in a query are RUN's. Without -c the query is read from stdin, and on a terminal
    a prompt asks for it. Nothing of the run is changed.
    """
    if as_csv and as_json:
        raise InputError("--csv and --json: choose one")
    from exgrpo_cli.console import sql as ask

    ask(run, command, "csv" if as_csv else "json" if as_json else "table")


@app.command(rich_help_panel="Data and inspection")
@_command
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    as_json: JsonOption = False,
) -> None:
    """Write RUN/report.html: curves, buckets, evaluations and example rollouts."""
    from exgrpo_cli.report import write_report

    place = _run_dir(run)
    if not (place.recipe.exists() or place.metrics.exists()):
        raise InputError(
            f"{run}: neither recipe.toml nor metrics.jsonl here; is it a run directory?"
        )
    _result({"report": str(write_report(place))}, as_json)


@app.command("demo-model", rich_help_panel="Demo")
@_command
def demo_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of weights and data.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the tiny demo model: 0.6M parameters, warmed up on arithmetic in two minutes."""
    from exgrpo_cli.demo import make_demo_model

    _result(make_demo_model(out, seed=seed, force=force, log=to_stderr), as_json)


@app.command("demo-problems", rich_help_panel="Demo")
@_command
def demo_problems(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the three JSONL files.")],
    as_json: JsonOption = False,
) -> None:
    """Write the demo's problems: train, heldout and ood (longer ones)."""
    from exgrpo_cli.demo import write_demo_problems

    write_demo_problems(out)
    _result(
        {
            "train": str(out / "train.jsonl"),
            "heldout": str(out / "heldout.jsonl"),
            "ood": str(out / "ood.jsonl"),
        },
        as_json,
    )


def _step(place: RunDir, step: int | None, kind: str, given: Path | None, mend: str) -> int:
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


def _is_over(place: RunDir, step: int | None, as_json: bool) -> bool:
    """Whether every question is retired before this step; then that is the command's result, so
    that what has sent stages ahead (make, SLURM) ends in peace."""
    from exgrpo_cli.stages.curate import all_retired

    if step is None or not all_retired(place, step):
        return False
    if is_first_process():
        to_stderr(f"step {step}: every question is retired; there is nothing left to do")
        _result({"step": step, "finished": True}, as_json)
    return True


def _remove_if_unused(run: Path) -> None:
    """Take back a run directory in which nothing was begun."""
    if {entry.name for entry in run.iterdir()} <= {".lock"}:
        (run / ".lock").unlink(missing_ok=True)
        run.rmdir()


def _policy_name(policy: str | None) -> str | None:
    """A given policy as it stands in tables: a folder by its plain path."""
    return str(Path(policy)) if policy is not None and Path(policy).is_dir() else policy
