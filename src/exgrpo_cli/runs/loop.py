"""``exgrpo run``: the stages in turn, going on from whatever files exist."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines.warm import WarmEngine
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.runs.evaluations import evaluate_step
from exgrpo_cli.runs.prepare import check_devices, prepare
from exgrpo_cli.runs.processes import score_in_processes, train_in_processes, train_step
from exgrpo_cli.runs.tracking import open_tracker
from exgrpo_cli.stages.verify import open_pool, refuse_errors
from exgrpo_cli.step import Step

if TYPE_CHECKING:
    from exgrpo_cli.verifiers.pool import Pool


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
    check_devices(recipe)
    prepare(run, recipe, log)
    track = open_tracker(
        recipe.loop.track, run.root.name, run.root / "tensorboard", recipe.model_dump(mode="json")
    )
    engine, pool = WarmEngine(recipe, log), open_pool(recipe)
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
    from exgrpo_cli.inspect.report import write_report

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


def _say_unjudged(judged: dict[str, Any], step: int, log: Log) -> None:
    counts = judged.get("by_status", {})
    unjudged = {k: v for k, v in counts.items() if k in ("error", "timeout", "unparsable") and v}
    if unjudged:
        words = ", ".join(f"{count} {status}" for status, count in unjudged.items())
        log(f"step {step}: of {judged['rows']} verdicts {words}")


def _iterate(
    run: RunDir,
    step: int,
    recipe: Recipe,
    engine: WarmEngine,
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
                score_in_processes(run, step, recipe)
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

    def curated() -> dict[str, Any]:
        result = curate(Step.of(run, step), recipe)
        for note in result.notes:
            log(note)
        return {"skipped": result.skipped, **result.metrics}

    chosen = timed("curate", curated)
    said: list[str] = []
    several = recipe.train.processes > 1
    trained = timed(
        "train",
        lambda: (
            train_in_processes(run, step, recipe, said.append)
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
