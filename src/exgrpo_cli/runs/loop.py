"""``exgrpo run``: the stages in turn, going on from whatever files exist."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from exgrpo_cli.engines.warm import return_memory
from exgrpo_cli.progress import Log, quiet, stage_line
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.evaluations import evaluate_due
from exgrpo_cli.runs.prepare import check_engines, prepare
from exgrpo_cli.runs.processes import score_in_processes, train_in_processes
from exgrpo_cli.runs.session import Session
from exgrpo_cli.runs.tracking import example_rollouts, open_tracker
from exgrpo_cli.stages.rollout import rollout
from exgrpo_cli.stages.train import check_trainer
from exgrpo_cli.stages.verify import refuse_errors, verify
from exgrpo_cli.step import Result, Step
from exgrpo_cli.tables import remove_abandoned


def run(place: RunDir, recipe: Recipe, *, log: Log = quiet) -> dict[str, Any]:
    """Train for ``loop.steps`` iterations of rollout, verify, score, curate and train.

    The files are the same as those of the stages called one by one, and only what is missing is
    made, so a killed run goes on where it stopped when it is started again.

    Args:
        place: the run directory; made when it is not there.
        recipe: all settings.
        log: gets a line a step.

    Returns:
        ``steps`` (policies trained in all), ``finished`` (True when every question is retired),
        ``evaluations`` (name to the last pass@1), ``seconds``.

    Raises:
        InputError: see the stages.
    """
    started = time.monotonic()
    check_engines(place, recipe)
    # Before prepare writes the recipe: a tracker that does not start must not stay in it.
    track = open_tracker(recipe.loop.track, place, recipe.model_dump(mode="json"))
    recipe = prepare(place, recipe, log)
    latest = max(place.steps("policy"), default=0)
    if latest < recipe.loop.steps:  # or only train would miss it, after the sampling
        check_trainer(Step.of(place, latest))
    remove_abandoned(place.root)
    place.renew_metrics()
    finished = False

    def send(step: int) -> None:
        rows = []
        if recipe.loop.track != "none" and recipe.evaluates(step) and recipe.evaluate.problems:
            rows = example_rollouts(place, recipe, min(step, place.steps("rollouts")[-1]))
        for line in place.read_metrics()[-2:]:
            if line["step"] == step:
                track(step, {**line, "rollouts": rows})

    with Session(place, recipe, log) as session:
        evaluate_due(session, 0)
        for number in range(recipe.loop.steps):
            began = time.monotonic()
            if place.policy(number + 1).is_dir():  # but were its metrics recorded?
                done = session.step(number)
                _timed(done, "train", partial(_train, session, done))
            elif _iterate(session, session.step(number)):
                finished = True
                log(f"step {number}: every question is retired; nothing is left to learn from")
                break
            else:
                send(number)
                session.iterations.append(time.monotonic() - began)
            evaluate_due(session, number + 1)
        send(recipe.loop.steps)  # a line of its own: the last policy's evaluation
    last: dict[str, float] = {}
    for line in place.read_metrics():
        for name, value in line.items():
            if name.startswith("eval/") and name.endswith("/pass@1") and name.count("/") == 2:
                last[name.split("/")[1]] = value
    return {
        "steps": len(place.steps("policy")),
        "finished": finished,
        "evaluations": last,
        "seconds": round(time.monotonic() - started, 1),
    }


def _iterate(session: Session, step: Step) -> bool:
    """One iteration; True when every question is retired."""
    from exgrpo_cli.stages.curate import curate

    recipe, log = session.recipe, session.log
    engine, pool = session.engine, session.pool

    def timed(stage: str, call: Callable[[], Result]) -> Result:
        what = f"step {step.number + 1} of {recipe.loop.steps}: {stage}"
        with stage_line(what, session.seconds_left(step.number)):
            return _timed(step, stage, call)

    sampled = timed("rollout", lambda: rollout(step, recipe, log=log, engine=engine.at))
    if sampled.finished:
        return True
    judged = timed("verify", lambda: verify(step, recipe, pool=pool))
    for note in judged.notes:
        log(f"step {step.number}: {note}")
    refuse_errors(judged, step.verdicts)
    engine.make_room()
    if recipe.score.enabled:
        timed("score", lambda: _score(session, step))
    chosen = timed("curate", lambda: curate(step, recipe))
    trained = timed("train", lambda: _train(session, step))
    for note in (*chosen.notes, *trained.notes):
        log(note)
    log(_line(step.number, {**chosen.metrics, **trained.metrics}))
    return False


def _timed(step: Step, stage: str, call: Callable[[], Result]) -> Result:
    """Call a stage and record its seconds, and those of them that went into the work itself.

    A stage that found its files done keeps the time it took when it made them. Where a kill came
    before that was recorded, it is the time that the stage itself has left, if it has.
    """
    began = time.monotonic()
    result = call()
    if step.run is None:
        return result
    file = step.run.stage_metrics(step.number, f"time-{stage}")
    left = result.metrics.get(f"{stage}/seconds")
    if result.done:
        times = {f"time/{stage}": time.monotonic() - began}
        if result.compute_seconds is not None:
            times[f"time/{stage}_compute"] = result.compute_seconds
        step.run.record(step.number, file.stem, times)
    elif left is not None and not file.exists():
        step.run.record(step.number, file.stem, {f"time/{stage}": left})
    return result


def _score(session: Session, step: Step) -> Result:
    from exgrpo_cli.stages.score import score

    if session.recipe.score.processes > 1:
        return_memory()  # the processes need it
        return score_in_processes(session.run, step, session.recipe)
    return score(step, session.recipe)


def _train(session: Session, step: Step) -> Result:
    from exgrpo_cli.stages.train import train

    if session.recipe.train.processes > 1 and not step.next_policy.is_dir():
        return_memory()
        return train_in_processes(session.run, step, session.recipe)
    return train(step, session.recipe)


def _line(step: int, metrics: Mapping[str, Any]) -> str:
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
