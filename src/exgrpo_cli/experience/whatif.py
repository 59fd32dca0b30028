"""Other recipes over the same log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import choose_planned
from exgrpo_cli.experience.database import connect, fill, fill_problem_ids, sql_text
from exgrpo_cli.experience.log import files_of_step
from exgrpo_cli.experience.plan import draw_plan
from exgrpo_cli.experience.pool import State, take_in
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True)
class Choice:
    """What a recipe plans and replays in a step, given the log of the steps before it."""

    step: int
    replaying: bool
    """Whether replay is on in the step."""
    fresh: list[str]
    """The fresh questions of the plan."""
    replay: list[str]
    """The replay questions of the plan."""
    chosen: list[dict[str, Any]]
    """A trajectory for each replay question: ``problem_id``, ``rollout_id``, ``collected_step``,
    ``mean_entropy`` (nats), ``stale`` (not under the step's policy) and ``bucket``."""
    pool: dict[str, Any]
    """The experience before the step: ``trajectories``, ``questions``, ``easy``, ``medium``,
    ``hard``, ``retired`` and ``age_mean`` (steps; None where the pool is empty)."""


def choices(run: RunDir, recipe: Recipe, log: Log | None = None) -> Iterator[Choice]:
    """What a recipe would have planned and replayed in each step of a run's log.

    The experience is derived in memory from the recorded rollouts and verdicts, step by step; no
    file of the run is read or written beyond that. Before each step its plan is drawn and its
    trajectories are chosen. Entropies are those that were scored for the step, where the trajectory
    was a candidate of the run then, and otherwise those of its collection.

    Args:
        run: the run directory.
        recipe: ``curate``, ``rollout.samples`` and ``seed``.
        log: for a one-line message where the last step is not whole.

    Yields:
        One for each step that has rollouts, and one for the step after the last.

    Raises:
        InputError: no problems, or a step of the log before the last that is not whole.
    """
    run = RunDir(run.root)
    steps = run.steps("rollouts")
    state = State()
    with tempfile.TemporaryDirectory(prefix="exgrpo-") as spill, connect(Path(spill)) as con:
        fill_problem_ids(con, run.problems)
        for step in steps:
            step_files, unfinished = None, ""
            try:
                step_files = files_of_step(run, step)
            except InputError as error:
                if step < steps[-1]:
                    raise
                unfinished = str(error)
            scores = step_files.replay_scores if step_files else []
            yield _choice(con, step, scores, recipe, state)
            if step_files is None:
                if log:
                    log(f"step {step} is planned, but not taken in: {unfinished}")
                return
            take_in(con, run, step, step_files, recipe, state)
        if steps:
            yield _choice(con, steps[-1] + 1, [], recipe, state)


def _choice(
    con: duckdb.DuckDBPyConnection,
    step: int,
    replay_scores: Sequence[Path],
    recipe: Recipe,
    state: State,
) -> Choice:
    """The plan and the choice of a step, from ``pool`` and ``questions`` before it."""
    replaying = state.replay_from is not None and state.replay_from <= step
    plan, _ = draw_plan(con, recipe, step, replaying)
    rows = plan.select("problem_id", "role").rows()
    fill(con, "planned", rows)
    choose_planned(con, step, replay_scores, recipe)
    chosen = con.execute(
        "SELECT problem_id, rollout_id, collected_step, mean_entropy, stale, bucket FROM chosen"
    )
    names = [column[0] for column in chosen.description or []]
    picked = [dict(zip(names, row, strict=True)) for row in chosen.fetchall()]
    (statement,) = con.extract_statements(sql_text("pool_state"))
    result = con.execute(statement, {"step": step, "revive_after": recipe.curate.revive_after})
    numbers = [column[0] for column in result.description or []]
    return Choice(
        step=step,
        replaying=replaying,
        fresh=[problem for problem, role in rows if role == "fresh"],
        replay=[problem for problem, role in rows if role == "replay"],
        chosen=picked,
        pool=dict(zip(numbers, result.fetchall()[0], strict=True)),
    )
