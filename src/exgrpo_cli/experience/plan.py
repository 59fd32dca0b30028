"""What a step samples: fresh questions and replay questions."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.buckets import draw_counts
from exgrpo_cli.experience.database import connect, fill, fill_problems
from exgrpo_cli.experience.history import read_plan
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.experience.rules import columns_of_problems
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir

if TYPE_CHECKING:
    import polars as pl


def draw_plan(experience: Experience, step: int) -> tuple[pl.DataFrame, int]:
    """The plan of a step from the experience before it, and its epoch. The ids of the problem set
    are in the experience's ``problems``."""
    con, recipe = experience.con, experience.recipe
    samples = recipe.rollout.samples
    replay = _draw_replay(experience, step) if experience.replays(step) else []
    fill(con, "replayed", [(problem,) for problem in replay])
    fresh = experience.sql("plan_fresh", step=step, limit=recipe.curate.questions - len(replay))
    planned = [(row["problem_id"], "fresh", samples) for row in fresh]
    planned += [(problem, "replay", recipe.replay_samples) for problem in replay]
    prefix = "" if recipe.curate.count_replayed else "fresh_"
    found = con.execute(
        f"SELECT problem_id, {prefix}successes, {prefix}attempts FROM questions"
        " WHERE problem_id IN (SELECT unnest($1))",
        [[problem for problem, _, _ in planned]],
    ).fetchall()
    counts = {problem: (k, n) for problem, k, n in found}
    rows = [
        {
            "step": step,
            "problem_id": problem,
            "role": role,
            "samples": count,
            "successes": counts.get(problem, (None, None))[0],
            "attempts": counts.get(problem, (None, None))[1],
        }
        for problem, role, count in planned
    ]
    epoch = con.execute("SELECT coalesce(max(epoch), 0) FROM questions").fetchall()[0][0]
    return tables.frame("plan", rows), max([int(epoch), *(int(row["epoch"]) for row in fresh)])


def _draw_replay(experience: Experience, step: int) -> list[str]:
    """The replay questions of a step, in the order of the plan."""
    recipe = experience.recipe
    experience.sql("pool_questions", step=step)
    found = experience.sql("bucket_weights", step=step)
    buckets = [row for row in found if row["log_weight"] > -math.inf]
    sizes = {row["count"]: row["questions"] for row in buckets}
    # The margin is for shares that are not exact in binary, such as 0.29 * 100.
    wanted = math.floor(recipe.curate.replay_ratio * recipe.curate.questions + 1e-9)
    draw = min(sum(sizes.values()), wanted)
    if not draw:
        return []
    rng = random.Random(tables.row_seed(recipe.seed, "buckets", step))
    weights = {row["count"]: row["log_weight"] for row in buckets}
    fill(experience.con, "draws", sorted(draw_counts(sizes, weights, draw, rng).items()))
    return [row["problem_id"] for row in experience.sql("plan_replay", step=step)]


def first_plan(problems: Path, recipe: Recipe, log: Log = quiet) -> pl.DataFrame:
    """The plan of step 0: ``curate.questions`` fresh questions, or all of them where there are
    fewer."""
    with connect() as con:
        fill_problems(con, problems, columns_of_problems(recipe.curate))
        plan, _ = draw_plan(Experience(con, RunDir(problems.parent), recipe), 0)
        held = con.execute("SELECT count(*) FROM problems").fetchall()[0][0]
    if not plan.height:
        why = "curate.fresh weighs every problem 0" if held else "no problem in this table"
        raise InputError(f"{problems}: {why}; nothing can be sampled")
    if held < recipe.curate.questions:
        log(
            f"{problems} holds {held} problems, fewer than curate.questions ="
            f" {recipe.curate.questions}: each step takes all of them"
        )
    return plan


def all_retired(run: RunDir, step: int) -> bool:
    """Whether a plan of this step or of an earlier one, the run's last, is empty: curate found
    every question mastered, and nothing comes after it."""
    last = max(run.steps("plan"), default=None)
    return (
        last is not None
        and step >= last
        and tables.read_table("plan", run.plan(last), ["step"]).is_empty()
    )


def require_plan(run: RunDir, step: int) -> Path:
    """The step's plan."""
    path = run.plan(step)
    if not path.exists():
        stage, before = ("rollout", 0) if step == 0 else ("curate", step - 1)
        raise InputError(
            f"{path}: no plan for step {step}; run: exgrpo {stage} {run.root} --step {before}"
        )
    return path


def check_plan(experience: Experience, plan: Path, step: int) -> None:
    """Refuse a plan that was made for another problem set than that in ``problems``."""
    read_plan(experience.con, plan, step)
    count, first = experience.con.execute(
        "SELECT count(*), min(problem_id) FROM planned"
        " WHERE problem_id NOT IN (SELECT problem_id FROM problems)"
    ).fetchall()[0]
    if count:
        raise InputError(
            f"{plan}: {count} planned questions are not in {experience.run.problems} (the first is"
            f" {first}); the plan is for another problem set: restore the problems, or remove the"
            " plan and what was sampled by it"
        )
