"""Evaluations of a run's policies, or of any policy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.retention import prune_policies
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.prepare import import_into
from exgrpo_cli.runs.session import Session
from exgrpo_cli.step import Step

Summary = Mapping[str, Any]
"""The metrics of :func:`exgrpo_cli.stages.evaluate.evaluate`."""


def sets_due(run: RunDir, recipe: Recipe, step: int) -> dict[str, Path]:
    """The recipe's problem sets on which the policy of a step is due to be evaluated and was not
    yet; none where it was removed before it was due."""
    if not recipe.evaluates(step) or run.is_removed(step):
        return {}
    return {
        name: Path(source)
        for name, source in recipe.evaluate.problems.items()
        if not run.is_evaluated(step, name)
    }


def evaluate_due(session: Session, step: int) -> None:
    """Evaluate the policy of a step where it is due: see :func:`sets_due`."""
    for name, source in sets_due(session.run, session.recipe, step).items():
        evaluate_set(session, step, name, source)


def evaluate_set(
    session: Session, step: int, name: str, source: Path, *, force: bool = False
) -> Summary:
    """Evaluate a run's policy of a step on one problem set and record the metrics."""
    from exgrpo_cli.stages.evaluate import evaluate, evaluation_metrics

    run, recipe = session.run, session.recipe
    problems = run.root / "evaluations" / f"{name}.parquet"
    problems.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{name}.", suffix=".tmp", dir=problems.parent
    ) as folder:
        wanted = Path(folder) / problems.name
        import_into(wanted, source, recipe, recipe.model.path, quiet, name=name, held_out=True)
        same = problems.exists() and problems.read_bytes() == wanted.read_bytes()
        if problems.exists() and not (same or force):
            raise InputError(
                f"{problems}: the run was evaluated on another problem set of this name; give"
                f" {source} another name, or --force"
            )
        wanted.replace(problems)
    began = time.time()
    result = evaluate(
        Step.of(run, step, problems=problems, evaluation=run.evaluation(step, name)),
        recipe,
        force=force,
        log=session.log,
        engine=session.engine.at,
        pool=session.pool,
    )
    summary = result.metrics
    if result.done:
        times = {"began": began, "ended": time.time()}
        times = {f"time/evaluate/{name}_{key}": value for key, value in times.items()}
        run.record(step, f"time-evaluate-{name}", times)
    run.record(step, f"evaluate-{name}", evaluation_metrics(name, summary))
    prune_policies(run, recipe, step)  # another one may be the best now
    overall = summary["overall"]
    session.log(
        f"step {step}: {name} pass@1 {overall['pass@1']:.3f}"
        f" [{overall['low']:.3f}, {overall['high']:.3f}]"
    )
    return summary


def evaluate_sets(
    session: Session, step: int, sets: Mapping[str, str], *, force: bool = False
) -> dict[str, Summary]:
    """Evaluate a run's policy of a step on several problem sets (name to file): their summaries.

    What was sampled before is not sampled again unless ``force``.
    """
    summaries = {
        name: evaluate_set(session, step, name, Path(source), force=force)
        for name, source in sets.items()
    }
    _say_absent_sources(session.recipe, summaries.values(), session.log)
    return summaries


def evaluate_loose(
    policy: str, source: Path, out: Path, recipe: Recipe, *, force: bool = False, log: Log = quiet
) -> Summary:
    """Evaluate any policy on a problem set, into a folder of its own."""
    from exgrpo_cli.stages.evaluate import evaluate

    problems = out / "problems.parquet"
    # evaluate refuses a folder that holds another evaluation
    import_into(problems, source, recipe, None, log, held_out=True)
    step = Step.of(None, policy=policy, problems=problems, evaluation=out)
    summary = evaluate(step, recipe, force=force, log=log).metrics
    _say_absent_sources(recipe, [summary], log)
    return summary


def _say_absent_sources(recipe: Recipe, summaries: Iterable[Summary], log: Log) -> None:
    """Name the sources that ``evaluate.samples_by_source`` counts on and no set has."""
    found = {row["source"] for summary in summaries for row in summary["rows"]}
    for name in sorted(recipe.evaluate.samples_by_source.keys() - found):
        log(f"evaluate.samples_by_source: no problem is of source {name}, only {sorted(found)}")
