"""What a step samples: fresh questions and replay questions."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.buckets import draw_counts, weigh_buckets
from exgrpo_cli.experience.database import (
    connect,
    fill,
    fill_problem_ids,
    glob_safe,
    reading,
    run_sql,
)
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir

if TYPE_CHECKING:
    import duckdb
    import polars as pl


def draw_plan(
    con: duckdb.DuckDBPyConnection, recipe: Recipe, step: int, replaying: bool
) -> tuple[pl.DataFrame, int]:
    """The plan of ``step`` from ``pool``, ``questions`` and ``problems``, and its epoch."""
    curate, samples = recipe.curate, recipe.rollout.samples
    fill(con, "replayed")
    replay: list[str] = []
    if replaying:
        run_sql(
            con,
            "pool_questions",
            step=step,
            count_replayed=curate.count_replayed,
            weights=curate.weights,
            samples=samples,
            revive_after=curate.revive_after,
        )
        buckets = weigh_buckets(con, samples, curate)
        sizes = {row[0]: row[1] for row in buckets}
        # The margin is for shares that are not exact in binary, such as 0.29 * 100.
        wanted = math.floor(curate.replay_ratio * curate.questions + 1e-9)
        draw = min(sum(sizes.values()), wanted)
        if draw:
            rng = random.Random(tables.row_seed(recipe.seed, "buckets", step))
            counts = draw_counts(sizes, {row[0]: row[2] for row in buckets}, draw, rng)
            fill(con, "draws", sorted(counts.items()))
            replay = [r[0] for r in run_sql(con, "plan_replay", seed=recipe.seed, step=step)]
            fill(con, "replayed", [(problem,) for problem in replay])
    fresh = run_sql(
        con,
        "plan_fresh",
        seed=recipe.seed,
        step=step,
        limit=curate.questions - len(replay),
        revive_after=curate.revive_after,
    )
    k, n = ("successes", "attempts")
    if not curate.count_replayed:
        k, n = ("fresh_successes", "fresh_attempts")
    buckets_of = {
        row[0]: row[1:]
        for row in con.execute(
            f"SELECT problem_id, {k}, {n} FROM questions WHERE problem_id IN (SELECT unnest($1))",
            [[row[0] for row in fresh] + replay],
        ).fetchall()
    }
    rows = [
        {
            "step": step,
            "problem_id": problem,
            "role": role,
            "samples": count,
            "successes": buckets_of.get(problem, (None, None))[0],
            "attempts": buckets_of.get(problem, (None, None))[1],
        }
        for role, count, problems in (
            ("fresh", samples, [row[0] for row in fresh]),
            ("replay", samples - 1, replay),
        )
        for problem in problems
    ]
    epoch = con.execute("SELECT coalesce(max(epoch), 0) FROM questions").fetchall()[0][0]
    return tables.frame("plan", rows), max([int(epoch), *(int(row[1]) for row in fresh)])


def all_retired(run: RunDir, step: int) -> bool:
    """Whether a plan of this step or of an earlier one, the run's last, is empty: curate found
    every question mastered, and nothing comes after it."""
    last = max(run.steps("plan"), default=None)
    return (
        last is not None
        and step >= last
        and tables.read_table("plan", run.plan(last), ["step"]).is_empty()
    )


def first_plan(problems: Path, recipe: Recipe, log: Log | None = None) -> pl.DataFrame:
    """The plan of step 0: fresh questions only.

    Args:
        problems: the run's ``problems.parquet``.
        recipe: ``curate.questions`` questions are drawn (all of them where there are fewer), with
            ``rollout.samples`` samples each, by ``seed``.
        log: for a one-line message where there are fewer.

    Returns:
        The ``plan`` table of step 0.

    Raises:
        InputError: no such file, not a problems table, or no problem in it.
    """
    with connect() as con:
        fill_problem_ids(con, problems)
        plan, _ = draw_plan(con, recipe, 0, replaying=False)
    if not plan.height:
        raise InputError(f"{problems}: no problem in this table; nothing can be sampled")
    if log and plan.height < recipe.curate.questions:
        log(
            f"{problems} holds {plan.height} problems, fewer than curate.questions ="
            f" {recipe.curate.questions}: each step takes all of them"
        )
    return plan


def require_plan(run: RunDir, step: int) -> Path:
    path = run.plan(step)
    if not path.exists():
        mend = (
            f"run: exgrpo rollout {run.root} --step 0"
            if step == 0
            else f"run: exgrpo curate {run.root} --step {step - 1}"
        )
        raise InputError(f"{path}: no plan for step {step}; {mend}")
    return path


def check_plan(con: duckdb.DuckDBPyConnection, run: RunDir, plan: Path) -> None:
    """Refuse a plan that was made for another problem set."""
    with reading(("plan", plan, ["problem_id", "role"])):
        unknown = con.execute(
            "SELECT count(*), min(problem_id) FROM read_parquet($files)"
            " WHERE problem_id NOT IN (SELECT problem_id FROM problems)",
            {"files": glob_safe([plan])},
        ).fetchall()[0]
    if unknown[0]:
        raise InputError(
            f"{plan}: {unknown[0]} planned questions are not in {run.problems} (the first is"
            f" {unknown[1]}); the plan is for another problem set: restore the problems, or"
            " remove the plan and what was sampled by it"
        )
