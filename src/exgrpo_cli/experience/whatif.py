"""Other recipes over the same history."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import choose
from exgrpo_cli.experience.database import fill
from exgrpo_cli.experience.history import StepFiles
from exgrpo_cli.experience.plan import draw_plan
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import named_rows


@dataclass(frozen=True)
class Choice:
    """What a recipe plans and replays in a step, given the history of the steps before it."""

    step: int
    replaying: bool
    """Whether replay is on in the step."""
    fresh: list[str]
    """The fresh questions of the plan."""
    replay: list[str]
    """The replay questions of the plan."""
    chosen: list[dict[str, Any]]
    """What the replay questions replay: ``problem_id``, ``rollout_id``, ``collected_step``,
    ``mean_entropy`` (nats), ``stale`` (not under the step's policy) and ``bucket``."""
    pool: dict[str, Any]
    """The experience before the step: ``trajectories``, ``questions``, ``easy``, ``medium``,
    ``hard``, ``retired`` and ``age_mean`` (steps; None where the pool is empty)."""


def choices(run: RunDir, recipe: Recipe, log: Log = quiet) -> Iterator[Choice]:
    """What a recipe would have planned and replayed in each step of a run's history.

    The experience is derived in memory from the recorded rollouts and verdicts, step by step; no
    file of the run is read or written beyond that. Before each step its plan is drawn and its
    trajectories are chosen. Entropies are those that were scored for the step, where the trajectory
    was a candidate of the run then, and otherwise those of its collection.

    Args:
        recipe: ``curate``, ``rollout.samples`` and ``seed``.

    Yields:
        One for each step that has rollouts, and one for the step after the last.
    """
    steps = run.steps("rollouts")
    with (
        tempfile.TemporaryDirectory(prefix="exgrpo-") as spill,
        Experience.open(run, recipe, Path(spill)) as experience,
    ):
        experience.recorded = False
        for step in steps:
            try:
                files = StepFiles.of(run, step)
            except InputError as error:
                if step < steps[-1]:
                    raise
                yield _choice(experience, step, None)
                log(f"step {step} is planned, but not taken in: {error}")
                return
            yield _choice(experience, step, files)
            experience.take_in(files)
        if steps:
            yield _choice(experience, steps[-1] + 1, None)


def _choice(experience: Experience, step: int, files: StepFiles | None) -> Choice:
    """The plan and the choice of a step."""
    con = experience.con
    plan, _ = draw_plan(experience, step)
    rows = plan.select("problem_id", "role").rows()
    fill(con, "planned", rows)
    choose(experience, step, files)
    chosen = con.execute(
        "SELECT problem_id, rollout_id, collected_step, mean_entropy, stale, bucket FROM chosen"
    )
    return Choice(
        step=step,
        replaying=experience.replays(step),
        fresh=[problem for problem, role in rows if role == "fresh"],
        replay=[problem for problem, role in rows if role == "replay"],
        chosen=named_rows(chosen),
        pool=experience.sql("pool_state", step=step)[0],
    )
