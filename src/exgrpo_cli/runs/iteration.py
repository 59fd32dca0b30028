"""One iteration of a run: a step is sampled, then trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from exgrpo_cli.engines.warm import return_memory
from exgrpo_cli.progress import Log, stage_line
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.runs.processes import score_in_processes, train_in_processes
from exgrpo_cli.runs.session import Session
from exgrpo_cli.runs.times import timed
from exgrpo_cli.stages.rollout import rollout
from exgrpo_cli.stages.verify import refuse_errors, verify
from exgrpo_cli.step import Result, Step


def sample_step(session: Session, step: Step) -> Mapping[str, Any] | None:
    """Rollout, verify, score and curate: the step's metrics; None when every question is
    retired."""
    from exgrpo_cli.stages.curate import curate

    recipe, log = session.recipe, session.log
    engine, pool = session.engine, session.pool
    at_work = partial(_at_work, recipe, step, seconds_left=session.seconds_left(step.number))

    sampled = at_work("rollout", lambda: rollout(step, recipe, log=log, engine=engine.at))
    if sampled.finished:
        log(f"step {step.number}: every question is retired; nothing is left to learn from")
        return None
    judged = at_work("verify", lambda: verify(step, recipe, pool=pool))
    for note in judged.notes:
        log(f"step {step.number}: {note}")
    refuse_errors(judged, step.verdicts)
    if recipe.score.enabled or recipe.loop.lag == 0:  # else training has a GPU of its own
        engine.make_room()
    if recipe.score.enabled:
        at_work("score", lambda: _score(recipe, step))
    chosen = at_work("curate", lambda: curate(step, recipe))
    for note in chosen.notes:
        log(note)
    return chosen.metrics


def train_step(
    recipe: Recipe, step: Step, log: Log, seconds_left: float | None = None
) -> Mapping[str, Any]:
    """Train: the step's metrics."""
    trained = _at_work(recipe, step, "train", lambda: _train(recipe, step), seconds_left)
    for note in trained.notes:
        log(note)
    return trained.metrics


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
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


def _at_work(
    recipe: Recipe, step: Step, stage: str, call: Callable[[], Result], seconds_left: float | None
) -> Result:
    """Call a stage, recorded, and with a line on a terminal."""
    with stage_line(f"step {step.number + 1} of {recipe.loop.steps}: {stage}", seconds_left):
        return timed(step, stage, call)


def _score(recipe: Recipe, step: Step) -> Result:
    from exgrpo_cli.stages.score import score

    if recipe.score.processes > 1 and step.run is not None:
        return_memory()  # the processes need it
        return score_in_processes(step.run, step, recipe)
    return score(step, recipe)


def _train(recipe: Recipe, step: Step) -> Result:
    from exgrpo_cli.stages.train import train

    if recipe.train.processes > 1 and step.run is not None and not step.next_policy.is_dir():
        return_memory()
        return train_in_processes(step.run, step, recipe)
    return train(step, recipe)
