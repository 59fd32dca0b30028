"""``exgrpo run``: the stages in turn, going on from whatever files exist."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from exgrpo_cli.experience.plan import all_retired
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.evaluations import evaluate_due, sets_due
from exgrpo_cli.runs.iteration import sample_step, step_line, train_step
from exgrpo_cli.runs.prepare import check_engines, prepare
from exgrpo_cli.runs.session import Session
from exgrpo_cli.runs.sides import Side, run_side, side_by_side, split_devices
from exgrpo_cli.runs.tracking import example_rollouts, open_tracker
from exgrpo_cli.stages.train import check_trainer
from exgrpo_cli.step import Step
from exgrpo_cli.tables import remove_abandoned


def run(
    place: RunDir, recipe: Recipe, *, only: Side | None = None, log: Log = quiet
) -> dict[str, Any]:
    """Train for ``loop.steps`` iterations of rollout, verify, score, curate and train.

    The files are the same as those of the stages called one by one, and only what is missing is
    made, so a killed run goes on where it stopped when it is started again. With ``loop.lag``
    sampling and training are processes of their own, which go on at the same time.

    Args:
        place: the run directory; made when it is not there.
        recipe: all settings.
        only: do one side of a run that was begun, and wait for the files of the other, which
            somebody else does.
        log: gets a line a step.

    Returns:
        ``steps`` (policies trained in all), ``finished`` (True when every question is retired),
        ``evaluations`` (name to the last pass@1), ``seconds``.

    Raises:
        InputError: see the stages.
        StageError: likewise; or a side was killed.
    """
    started = time.monotonic()
    if only != "train":
        check_engines(place, recipe)
    shares = split_devices(recipe) if recipe.loop.lag and only is None else None
    # Before prepare writes the recipe: a tracker that does not start must not stay in it.
    kind = "none" if only == "sample" else recipe.loop.track
    track = open_tracker(kind, place, recipe.model_dump(mode="json"))
    if only is None:
        recipe = prepare(place, recipe, log)
        remove_abandoned(place.root)
        place.renew_metrics()
    latest = max(place.steps("policy"), default=0)
    if latest < recipe.loop.steps and only != "sample":  # or only train would miss it
        check_trainer(Step.of(place, latest))

    def send(step: int) -> None:
        rows = []
        if recipe.loop.track != "none" and recipe.evaluates(step) and recipe.evaluate.problems:
            rows = example_rollouts(
                place, recipe, min(step, max(place.steps("rollouts"), default=0))
            )
        for line in place.read_metrics():
            if line["step"] == step:
                track(step, {**line, "rollouts": rows})

    if shares is None and only is None:
        _in_turn(place, recipe, log, send)
    else:
        due = latest

        def send_complete(end: bool = False) -> None:
            nonlocal due
            while kind != "none" and due <= recipe.loop.steps:
                if not (end or _is_complete(place, recipe, due)):
                    break
                send(due)
                due += 1

        if shares is not None:
            side_by_side(place, shares, log, send_complete)
        elif only is not None:
            run_side(only, place, recipe, log, send_complete)
        send_complete(end=True)
    last: dict[str, float] = {}
    for line in place.read_metrics():
        for name, value in line.items():
            if name.startswith("eval/") and name.endswith("/pass@1") and name.count("/") == 2:
                last[name.split("/")[1]] = value
    steps = max(place.steps("policy"), default=0)
    return {
        "steps": steps,
        "finished": all_retired(place, steps),
        "evaluations": last,
        "seconds": round(time.monotonic() - started, 1),
    }


def _in_turn(place: RunDir, recipe: Recipe, log: Log, send: Callable[[int], None]) -> None:
    with Session(place, recipe, log) as session:
        evaluate_due(session, 0)
        for number in range(recipe.loop.steps):
            began = time.monotonic()
            step = Step.of(place, number)
            if place.policy(number + 1).is_dir():  # but were its metrics recorded?
                train_step(recipe, step, log)
            else:
                curated = sample_step(session, step)
                if curated is None:
                    break
                trained = train_step(recipe, step, log, session.seconds_left(number))
                log(step_line(number, {**curated, **trained}))
                send(number)
                session.iterations.append(time.monotonic() - began)
            evaluate_due(session, number + 1)
        # a line of its own: the last policy's evaluation
        send(max(place.steps("policy"), default=0))


def _is_complete(place: RunDir, recipe: Recipe, step: int) -> bool:
    """Whether nothing is missing in a step's line of the metrics."""
    trained = step == recipe.loop.steps or place.stage_metrics(step, "time-train").exists()
    return trained and place.policy(step).is_dir() and not sets_due(place, recipe, step)
