"""Evaluations of a run's policies, or of any policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.engines import Engine
from exgrpo_cli.engines.warm import WarmEngine
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.runs.prepare import import_into
from exgrpo_cli.stages.verify import open_pool

if TYPE_CHECKING:
    from exgrpo_cli.verifiers.pool import Pool


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
    engine, pool = WarmEngine(recipe, log), open_pool(recipe)
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
