"""``exgrpo run``: the stages in turn, going on from whatever files exist."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Engine, engine_count, open_engines, resolve_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.progress import Log, is_first_process, quiet
from exgrpo_cli.recipe import ProblemSettings, Recipe, differences, load_recipe, to_toml
from exgrpo_cli.rundir import LOCK_VARIABLE, RunDir, step_name
from exgrpo_cli.stages.verify import open_pool, refuse_errors
from exgrpo_cli.tracking import open_tracker

if TYPE_CHECKING:
    from exgrpo_cli.verifiers.pool import Pool


SAMPLED_BY = (
    "seed", "rollout.temperature", "rollout.max_new_tokens", "rollout.max_prompt_tokens",
    "model.template", "model.plain_template", "model.system", "model.replace_system",
)  # fmt: skip
"""Settings that a step's rollouts have in common, and that what is made from them counts on."""


def run_loop(
    run: RunDir, recipe: Recipe, *, profile: bool = False, log: Log = quiet
) -> dict[str, Any]:
    """Train for ``loop.steps`` iterations of rollout, verify, score, curate and train.

    The files are the same as those of the stages called one by one, and only what is missing is
    made, so a killed run goes on where it stopped when it is started again.

    Args:
        run: the run directory; made when it is not there.
        recipe: all settings.
        profile: record where each iteration's time went, as metrics ``profile/...``.
        log: gets a line a step.

    Returns:
        ``steps`` (policies trained in all), ``finished`` (True when every question is retired),
        ``evaluations`` (name to the last pass@1), ``report`` (its path), ``seconds``.

    Raises:
        InputError: see the stages.
    """
    started = time.monotonic()
    _check_devices(recipe)
    prepare(run, recipe, log)
    track = open_tracker(
        recipe.loop.track, run.root.name, run.root / "tensorboard", recipe.model_dump(mode="json")
    )
    engine, pool = _WarmEngine(recipe, log), open_pool(recipe)
    finished = False

    def send(step: int) -> None:
        for line in run.read_metrics()[-2:]:
            if line["step"] == step:
                track(step, line)

    try:
        evaluate_step(run, 0, recipe, engine.at, pool, log)
        for step in range(recipe.loop.steps):
            if run.policy(step + 1).is_dir():
                train_step(run, step, recipe)  # is done; but were its metrics recorded?
                evaluate_step(run, step + 1, recipe, engine.at, pool, log)
                continue
            finished = _iterate(run, step, recipe, engine, pool, log, profile=profile)
            if finished:
                log(f"step {step}: every question is retired; nothing is left to learn from")
                break
            send(step)
            evaluate_step(run, step + 1, recipe, engine.at, pool, log)
        send(recipe.loop.steps)  # a line of its own: the last policy's evaluation
    finally:
        engine.close()
        pool.close()
    from exgrpo_cli.report import write_report

    last: dict[str, float] = {}
    for line in run.read_metrics():
        for name, value in line.items():
            if name.startswith("eval/") and name.endswith("/pass@1") and name.count("/") == 2:
                last[name.split("/")[1]] = value
    return {
        "steps": len(run.steps("policy")),
        "finished": finished,
        "evaluations": last,
        "report": str(write_report(run)),
        "seconds": round(time.monotonic() - started, 1),
    }


def prepare(run: RunDir, recipe: Recipe, log: Log = quiet) -> None:
    """Put the recipe and the problems into the run directory, where they are not there yet.

    A changed recipe replaces ``recipe.toml``, and the keys that changed are said.

    Raises:
        InputError: no problems given, or none that fit; settings that cannot train, or that this
            run was begun without.
    """
    from exgrpo_cli.models import check_policy, positions
    from exgrpo_cli.stages.rollout import check_sampling

    if run.root.exists() and not run.root.is_dir():
        raise InputError(f"{run.root}: is a file; a run is a directory")
    check_policy(recipe.model.path)
    check_sampling(recipe)
    if recipe.curate.replay_ratio > 0 and recipe.rollout.samples - 1 <= recipe.curate.lower:
        raise InputError(
            f"rollout.samples = {recipe.rollout.samples} and curate.lower ="
            f" {recipe.curate.lower}: no success would ever be stored; raise samples, or set"
            " curate.replay_ratio = 0"
        )
    changed = differences(load_recipe(run.recipe), recipe) if run.recipe.exists() else {}
    latest = max(run.steps("policy"), default=0)
    sampled = any(run.rollouts(latest).glob("*part-*"))  # also what a killed task has left
    for key, (old, new) in changed.items():
        if sampled and key in SAMPLED_BY:
            raise InputError(
                f"{run.root}: {key} was {old!r} when step {latest} was sampled, and becomes"
                f" {new!r} only between steps; train step {latest} first, or remove"
                f" {run.rollouts(latest)}"
            )
        trained = bool(run.steps("policy")) and key.startswith(("lora.", "model.path"))
        if trained or (run.problems.exists() and key.startswith("problems.")):
            raise InputError(
                f"{run.root}: {key} was {old!r} and cannot become {new!r} in this run; start"
                " another run directory"
            )
    if not run.problems.exists():
        if not recipe.problems.path:
            raise InputError(
                f"{run.problems}: no problems yet; set problems.path in the recipe, or run:"
                f" exgrpo problems FILE --out {run.problems}"
            )
        import_into(run.problems, Path(recipe.problems.path), recipe, recipe.model.path, log)
    limit = positions(recipe.model.path)
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if limit is not None and limit < longest:
        log(
            f"{recipe.model.path}: has {limit} positions, and rollout.max_prompt_tokens +"
            f" rollout.max_new_tokens is {longest}; responses will be cut off there"
        )
    for key, (old, new) in changed.items():
        log(f"recipe: {key} was {old!r}, is now {new!r}")
    tables.write_text(run.recipe, to_toml(recipe))


def _check_devices(recipe: Recipe) -> None:
    """Refuse more processes than there are GPUs, before anything is sampled."""
    from exgrpo_cli.engines.parallel import engine_environments, process_environments

    if engine_count(recipe) > 1:
        engine_environments(recipe)
    if recipe.score.enabled and recipe.score.processes > 1:
        process_environments(recipe.score.processes)


def import_into(
    out: Path | None,
    source: Path,
    recipe: Recipe,
    policy: str | None,
    log: Log,
    *,
    name: str | None = None,
    dedupe: bool = True,
    held_out: bool = False,
) -> dict[str, Any]:
    """Import a problem set, leaving out prompts that are too long for the policy.

    Args:
        out: where the ``problems`` table goes; None only checks.
        source: a file or folder in any known format.
        recipe: ``problems`` and ``rollout.max_prompt_tokens``.
        policy: whose tokenizer counts; None keeps every length.
        log: gets what was dropped.
        name: the set's name, where rows have none.
        dedupe: whether a question that stands several times enters once.
        held_out: whether it is for evaluation: of ``problems`` only the verifier counts, the rest
            is of the training set.

    Returns:
        The importer's report, with ``too_long`` and ``problems`` (how many were kept).

    Raises:
        InputError: see :func:`exgrpo_cli.problems.import_problems`; nothing left; ``out`` is the
            source itself, a folder, or no .parquet file.
    """
    from exgrpo_cli.problems import import_problems

    if out is not None:
        _check_target(out, source)
    settings = recipe.problems
    training = settings if not held_out else ProblemSettings(verifier=settings.verifier)
    imported = import_problems(
        source,
        training.format,
        training.verifier,
        name,
        training.limit,
        dedupe,
        log,
        columns={str(name): column for name, column in training.columns.items()},
        skip_bad=training.skip_bad,
    )
    problems, report = imported.frame, dict(imported.report)
    if policy is not None:
        from exgrpo_cli.models import load_tokenizer
        from exgrpo_cli.problems.prompts import render_prompt

        tokenizer = load_tokenizer(policy, recipe.model)
        limit = recipe.rollout.max_prompt_tokens
        fits = [len(render_prompt(p, tokenizer, recipe.model)) <= limit for p in problems["prompt"]]
        report["too_long"] = fits.count(False)
        if report["too_long"]:
            log(f"{source}: {report['too_long']} prompts of more than {limit} tokens left out")
            problems = problems.filter(fits)
    if problems.is_empty():
        raise InputError(f"{source}: no problem is left; see rollout.max_prompt_tokens")
    report["problems"] = problems.height
    if out is not None:
        tables.write_table("problems", problems, out)
        report["out"] = str(out)
    return report


def _check_target(out: Path, source: Path) -> None:
    """Refuse to write a problems table where it would surprise."""
    if out.suffix != ".parquet" or out.is_dir():
        raise InputError(f"{out}: a problems table is a .parquet file; give --out NAME.parquet")
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"{out}: is the source itself; give another --out")


def _say_unjudged(judged: dict[str, Any], step: int, log: Log) -> None:
    counts = judged.get("by_status", {})
    unjudged = {k: v for k, v in counts.items() if k in ("error", "timeout", "unparsable") and v}
    if unjudged:
        words = ", ".join(f"{count} {status}" for status, count in unjudged.items())
        log(f"step {step}: of {judged['rows']} verdicts {words}")


def evaluate_step(
    run: RunDir,
    step: int,
    recipe: Recipe,
    engine_at: Callable[[str], Engine],
    pool: Pool,
    log: Log,
) -> None:
    """Evaluate the policy of a step on the recipe's problem sets, where it is due and missing."""
    every, last = recipe.evaluate.every, recipe.loop.steps
    if every == 0 or (step % every != 0 and step != last):
        return
    for name, source in recipe.evaluate.problems.items():
        if not (run.evaluation(step, name) / "summary.json").exists():
            evaluate_set(run, step, name, Path(source), recipe, engine_at, pool, log)


def evaluate_set(
    run: RunDir,
    step: int,
    name: str,
    source: Path,
    recipe: Recipe,
    engine_at: Callable[[str], Engine],
    pool: Pool,
    log: Log,
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Evaluate a run's policy of a step on one problem set and record the metrics.

    Args:
        run: the run directory.
        step: whose policy.
        name: the set's name in paths and metrics.
        source: its problems, in any known format.
        recipe: ``evaluate``, ``rollout`` and ``model``.
        engine_at: gives an engine that holds a policy.
        pool: workers that verify.
        log: gets a line with the result.
        force: import the problems and evaluate again.

    Returns:
        The summary of :func:`exgrpo_cli.stages.evaluate.evaluate`.
    """
    from exgrpo_cli.stages.evaluate import evaluate, evaluation_metrics

    problems = run.root / "evaluations" / f"{name}.parquet"
    policy = run.policy_path(step, recipe.model.path)
    wanted = problems.with_name(f".{name}.{os.getpid()}.parquet")
    try:
        import_into(wanted, source, recipe, recipe.model.path, quiet, name=name, held_out=True)
        same = problems.exists() and problems.read_bytes() == wanted.read_bytes()
        if problems.exists() and not (same or force):
            raise InputError(
                f"{problems}: the run was evaluated on another problem set of this name; give"
                f" {source} another name, or --force"
            )
        wanted.replace(problems)
    finally:
        wanted.unlink(missing_ok=True)
    summary = evaluate(
        policy=policy,
        policy_name=step_name(step),
        problems=problems,
        out=run.evaluation(step, name),
        recipe=recipe,
        samples=recipe.evaluate.samples,
        samples_by_source=recipe.evaluate.samples_by_source,
        temperature=recipe.evaluate.temperature,
        max_new_tokens=recipe.evaluate.max_new_tokens or recipe.rollout.max_new_tokens,
        engine=lambda: engine_at(policy),
        pool=pool,
        step=step,
        force=force,
        log=log,
    )
    run.record(step, f"evaluate-{name}", evaluation_metrics(name, summary))
    overall = summary["overall"]
    log(
        f"step {step}: {name} pass@1 {overall['pass@1']:.3f}"
        f" [{overall['low']:.3f}, {overall['high']:.3f}]"
    )
    return summary


def evaluate_sets(
    run: RunDir,
    step: int,
    sets: Mapping[str, str],
    recipe: Recipe,
    *,
    force: bool = False,
    log: Log = quiet,
) -> dict[str, dict[str, Any]]:
    """Evaluate a run's policy of a step on several problem sets (name to file).

    Returns:
        The summary of each set; what was sampled before is not sampled again unless ``force``.
    """
    engine, pool = _WarmEngine(recipe, log), open_pool(recipe)
    summaries = {}
    try:
        for name, source in sets.items():
            summaries[name] = evaluate_set(
                run, step, name, Path(source), recipe, engine.at, pool, log, force=force
            )
    finally:
        engine.close()
        pool.close()
    _say_absent_sources(recipe, summaries.values(), log)
    return summaries


def _say_absent_sources(recipe: Recipe, summaries: Iterable[dict[str, Any]], log: Log) -> None:
    """Name the sources that ``evaluate.samples_by_source`` counts on and no set has."""
    found = {row["source"] for summary in summaries for row in summary["rows"]}
    for name in sorted(recipe.evaluate.samples_by_source.keys() - found):
        log(f"evaluate.samples_by_source: no problem is of source {name}, only {sorted(found)}")


def evaluate_loose(
    policy: str, source: Path, out: Path, recipe: Recipe, *, force: bool = False, log: Log = quiet
) -> dict[str, Any]:
    """Evaluate any policy on a problem set, into a folder of its own.

    Returns:
        The summary of :func:`exgrpo_cli.stages.evaluate.evaluate`.
    """
    from exgrpo_cli.stages.evaluate import evaluate

    problems = out / "problems.parquet"
    # evaluate refuses a folder that holds another evaluation
    import_into(problems, source, recipe, None, log, held_out=True)
    summary = evaluate(
        policy=policy,
        policy_name=policy,
        problems=problems,
        out=out,
        recipe=recipe,
        samples=recipe.evaluate.samples,
        samples_by_source=recipe.evaluate.samples_by_source,
        temperature=recipe.evaluate.temperature,
        max_new_tokens=recipe.evaluate.max_new_tokens or recipe.rollout.max_new_tokens,
        force=force,
        log=log,
    )
    _say_absent_sources(recipe, [summary], log)
    return summary


def _iterate(
    run: RunDir,
    step: int,
    recipe: Recipe,
    engine: _WarmEngine,
    pool: Pool,
    log: Log,
    *,
    profile: bool,
) -> bool:
    """One iteration; True when every question is retired."""
    from exgrpo_cli.profiling import compute_seconds, profile_metrics
    from exgrpo_cli.stages.curate import curate
    from exgrpo_cli.stages.rollout import ensure_plan, rollout
    from exgrpo_cli.stages.score import score
    from exgrpo_cli.stages.verify import verify
    from exgrpo_cli.verifiers.pool import default_workers

    started = time.monotonic()
    wall: dict[str, float] = {}
    compute: dict[str, float] = {}
    policy, name = run.policy_path(step, recipe.model.path), step_name(step)
    plan = ensure_plan(run, step, recipe, log)
    if tables.read_table("plan", plan, ["step"]).is_empty():
        return True

    def timed(stage: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.monotonic()
        result = call()
        # A stage that found its files done keeps the time it took when it made them.
        if not result.get("skipped") and result.get("parts_done", 1):
            wall[stage] = time.monotonic() - began
            run.record(step, f"time-{stage}", {f"time/{stage}": wall[stage]})
            if profile:
                workers = recipe.verify.workers or default_workers()
                compute[stage] = compute_seconds(stage, result, run.verdicts(step), workers)
        return result

    timed(
        "rollout",
        lambda: rollout(
            problems=run.problems,
            plan=plan,
            out=run.rollouts(step),
            policy=policy,
            policy_name=name,
            step=step,
            recipe=recipe,
            engine=lambda: engine.at(policy),
            stale=(run.verdicts(step), run.scores(step)),
            log=log,
        ),
    )
    judged = timed(
        "verify",
        lambda: verify(run.rollouts(step), run.problems, run.verdicts(step), recipe, pool=pool),
    )
    _say_unjudged(judged, step, log)
    refuse_errors(judged, run.verdicts(step))
    engine.make_room()
    if recipe.score.enabled:
        timed(
            "score",
            lambda: (
                _score_in_processes(run, step, recipe)
                if recipe.score.processes > 1
                else score(
                    rollouts=run.rollouts(step),
                    out=run.scores(step),
                    policy=policy,
                    policy_name=name,
                    step=step,
                    recipe=recipe,
                    run=run,
                )
            ),
        )

    def say(line: str) -> None:
        if not line.startswith((f"step {step}", "planned step")):  # said below, with the training
            log(line)

    chosen = timed("curate", lambda: curate(run, step, recipe, log=say))
    said: list[str] = []
    several = recipe.train.processes > 1
    trained = timed(
        "train",
        lambda: (
            _train_in_processes(run, step, recipe, said.append)
            if several
            else train_step(run, step, recipe, said.append)
        ),
    )
    for line in said:
        if trained.get("train/skipped_updates") or "warning: " in line:
            log(line)
    log(_line(step, chosen | trained))
    if profile and compute:
        iteration = time.monotonic() - started
        run.record(step, "profile", profile_metrics(wall, compute, iteration))
    return False


def train_step(
    run: RunDir,
    step: int,
    recipe: Recipe,
    log: Log = quiet,
    *,
    policy: str | None = None,
    trainer: Path | None = None,
    out_policy: Path | None = None,
    out_trainer: Path | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """The train stage with a run directory's own files; its metrics are recorded there.

    Explicit paths stand in for the run's own.

    Raises:
        InputError: see :func:`exgrpo_cli.stages.train.train`.
    """
    from exgrpo_cli.models import check_tokenizer
    from exgrpo_cli.stages.curate import replay_on
    from exgrpo_cli.stages.train import train

    scores = run.scores(step)
    source = policy or run.policy_path(step, recipe.model.path)
    if not (out_policy or run.policy(step + 1)).exists():
        check_tokenizer(source)  # or only the next rollout would miss it
    result = train(
        rollouts=run.rollouts(step),
        verdicts=run.verdicts(step),
        scores=scores if scores.is_dir() else None,
        curated=run.curated(step),
        policy=source,
        trainer=trainer or (run.trainer(step) if step > 0 else None),
        out_policy=out_policy or run.policy(step + 1),
        out_trainer=out_trainer or run.trainer(step + 1),
        step=step,
        recipe=recipe,
        replay_started=replay_on(run, step),
        force=force,
        log=log,
    )
    kept = run.root / "metrics" / step_name(step) / "train.json"
    if not is_first_process():
        return result
    if "train/loss" in result and not (result.get("skipped") and kept.exists()):
        run.record(step, "train", {k: v for k, v in result.items() if k.startswith("train/")})
    return result


def _score_in_processes(run: RunDir, step: int, recipe: Recipe) -> dict[str, Any]:
    """The score stage in ``score.processes`` processes of this machine, a shard each.

    Returns:
        The sums of what they count; ``seconds`` and ``compute_seconds`` of the slowest.

    Raises:
        StageError: a process failed; the parts that are done stay.
    """
    from exgrpo_cli.engines.parallel import process_environments

    count = recipe.score.processes
    _return_memory()
    command = [sys.executable, "-m", "exgrpo_cli", "score", str(run.root), "--step", str(step)]
    started: list[subprocess.Popen[str]] = []
    results: list[dict[str, Any]] = []
    try:
        for number, variables in enumerate(process_environments(count)):
            started.append(
                subprocess.Popen(
                    [*command, "--shard", f"{number}/{count}", "--json"],
                    env=os.environ | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for number, process in enumerate(started):
            out, said = process.communicate()
            if process.returncode != 0:
                raise StageError(
                    f"score step {step} failed in process {number + 1} of {count}:"
                    f" {_why_failed(said.splitlines())}"
                )
            results.append(json.loads(out))
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()
    longest = ("seconds", "compute_seconds")
    return {
        name: (max if name in longest else sum)(result[name] for result in results)
        for name in results[0]
    }


def _train_in_processes(run: RunDir, step: int, recipe: Recipe, log: Log) -> dict[str, Any]:
    """:func:`train_step` in ``train.processes`` processes of this machine, by torchrun.

    Raises:
        StageError: a process failed.
    """
    done = run.policy(step + 1).is_dir()
    if not done:
        _return_memory()  # that this process scored with
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(recipe.train.processes), "-m", "exgrpo_cli"),
            *("train", str(run.root), "--step", str(step)),
        ]
        variables = os.environ | {
            LOCK_VARIABLE: str(run.root.resolve()),
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // recipe.train.processes, 1))
            ),
        }
        with subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            close_fds=False,  # should we be killed, it goes on, under our lock
        ) as process:
            assert process.stderr is not None
            lines = [line.rstrip() for line in process.stderr]
        own = [line for line in lines if line.startswith(("train step", "warning: ", "exgrpo: "))]
        for line in own:
            log(line)
        if process.returncode != 0:
            raise StageError(
                f"train step {step} failed in {recipe.train.processes} processes:"
                f" {_why_failed(lines)}"
            )
    result = train_step(run, step, recipe)
    return result if done else {k: v for k, v in result.items() if k != "skipped"}


def _why_failed(lines: Sequence[str]) -> str:
    """The reason in what torchrun and its processes said: the signal that ended the first one to
    fail (others only miss it), else the first error of our own, else the last line."""
    ranks = [line.split(":", 1)[1].strip() for line in lines if line.startswith("  rank ")]
    ends = [line.split(":", 1)[1].strip() for line in lines if line.startswith("  exitcode ")]
    if ranks and ends and ends[-1].startswith("-"):  # torchrun names the first failure last
        return f"process {ranks[-1]} was ended, exit code {ends[-1]}; out of memory?"
    for line in lines:
        if line.startswith("exgrpo: "):
            return line.removeprefix("exgrpo: ")
    return next((line for line in reversed(lines) if line.strip("= -")), "nothing was said")


def adopt(
    run: RunDir,
    step: int,
    *,
    rollouts: Path,
    verdicts: Path,
    scores: Path | None = None,
    problems: Path | None = None,
) -> None:
    """Take loose files into a run's log as a step, so that they can be curated.

    The log is what the experience is derived from, so the files are linked into it (or copied, on
    another file system). A step without a plan gets the one that its rollouts tell of.

    Args:
        run: the run directory; made when it is not there.
        step: t; the rollouts must be of this step.
        rollouts: a folder of parts, or a file.
        verdicts: likewise.
        scores: likewise; None for none.
        problems: the ``problems`` table, where the run has none yet.

    Raises:
        InputError: the run holds other files in that place, or the rollouts are of another step.
    """
    import polars as pl

    counted = tables.read_table("rollouts", rollouts, ["step", "problem_id", "role"])
    for other in counted["step"].unique():
        if other != step:
            raise InputError(f"{rollouts}: rollouts of step {other}; give --step {other}")
    ids = set(tables.read_table("rollouts", rollouts, ["rollout_id"])["rollout_id"])
    judged = set(tables.read_table("verdicts", verdicts, ["rollout_id"])["rollout_id"])
    if ids - judged:
        raise InputError(
            f"{verdicts}: {len(ids - judged)} rollouts of {rollouts} have no verdict here (the"
            f" first is {min(ids - judged)})"
        )
    if problems is None and not run.problems.exists():
        raise InputError(f"{run.problems}: the run has no problems yet; give --problems")
    for source, folder in (
        (rollouts, run.rollouts(step)),
        (verdicts, run.verdicts(step)),
        (scores, run.scores(step)),
    ):
        if source is not None:
            files = tables.parquet_files(source)
            single = len(files) == 1 and not source.is_dir()
            for file in files:
                _link(file, folder / (tables.part_name(0, 1) if single else file.name))
    if problems is not None:
        _link(problems, run.problems)
    if not run.plan(step).exists():
        plan = (
            counted.group_by("step", "problem_id", "role", maintain_order=True)
            .agg(samples=pl.len().cast(pl.Int32))
            .with_columns(
                successes=pl.lit(None, dtype=pl.Int32), attempts=pl.lit(None, dtype=pl.Int32)
            )
        )
        tables.write_table("plan", plan, run.plan(step))


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where there can be none.

    Raises:
        InputError: another file lies there.
    """
    if target.exists():
        if not target.samefile(source) and target.read_bytes() != source.read_bytes():
            raise InputError(f"{target}: is there already and differs from {source}")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        with tables.atomic_path(target) as temporary:
            shutil.copyfile(source, temporary)


def _line(step: int, metrics: dict[str, Any]) -> str:
    """One step in one line."""
    parts = [
        ("reward", "reward/mean", ".3f"),
        ("replayed", "replay/questions", ".0f"),
        ("pool", "pool/trajectories", ".0f"),
        ("retired", "pool/retired", ".0f"),
        ("entropy", "train/entropy", ".3f"),
        ("grad norm", "train/grad_norm", ".3g"),
    ]
    shown = [f"{word} {metrics[k]:{form}}" for word, k, form in parts if metrics.get(k) is not None]
    return f"step {step}: " + ", ".join(shown)


def _return_memory() -> None:
    """Give the GPU memory back that torch holds after scoring and training; vLLM needs it."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class _WarmEngine:
    """One engine for the whole loop: opened when first needed, then given each new policy."""

    def __init__(self, recipe: Recipe, log: Log) -> None:
        self._recipe = recipe
        self._log = log
        self._engine: Engine | None = None
        self._policy = ""

    def at(self, policy: str) -> Engine:
        """The engine, with this policy loaded."""
        if self._engine is None or policy != self._policy:
            _return_memory()
        if self._engine is None:
            count = engine_count(self._recipe)
            side_by_side = f", {count} side by side" if count > 1 else ""
            self._log(
                f"opening {policy} in {resolve_engine(self._recipe.rollout.engine)}{side_by_side}"
            )
            self._engine = open_engines(self._recipe, policy)
        elif policy != self._policy:
            self._engine.load(policy)
        self._policy = policy
        return self._engine

    def make_room(self) -> None:
        """Before training on a GPU that vLLM has filled, let it sleep, or end it where it cannot.

        It stays awake where ``rollout.gpu_memory_utilization`` leaves training half of the GPU.
        """
        import torch

        if (
            self._engine is not None
            and self._engine.name == "vllm"
            and torch.cuda.is_available()
            and self._recipe.rollout.gpu_memory_utilization > 0.5
        ):
            if self._engine.sleep():
                self._policy = ""  # none is loaded
            else:
                self.close()

    def close(self) -> None:
        """End the engine; it is opened again when it is next needed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
