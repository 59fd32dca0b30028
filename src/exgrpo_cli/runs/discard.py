"""Going back to an earlier step: what was made from it, and after it, is removed."""

from __future__ import annotations

from exgrpo_cli.errors import InputError
from exgrpo_cli.rundir import RunDir, refuse_removed, step_name, step_number
from exgrpo_cli.tables import remove_folder

_LATER = (
    "evaluations", "curated", "scores", "verdicts", "rollouts", "metrics", "policy", "trainer",
    "plan",
)  # fmt: skip
"""What is removed of a later step, in this order, so that a run goes on wherever a kill comes: what
follows from something before that, and a policy before the optimizer's state and the plan, without
which no step goes on from it."""


def discard_after(run: RunDir, step: int, lag: int = 0) -> list[int]:
    """Remove all that a run made from a step's rollouts, and all later steps.

    The rollouts of the step stay (they are what is sampled again), as do its plan, its policy and
    its evaluations. The newest goes first, so that a kill leaves a run that ends earlier. The
    tables ``experience`` and ``questions`` are derived anew by the next curate.

    Args:
        lag: ``loop.lag``: the step, and those after it, are sampled by policies from t - lag on.
    """
    for number in range(max(step - lag, run.first_step(), 1), step + 1):
        refuse_removed(run.policy(number))
    nearest = run.restarts(step)[-1]
    if nearest < step:
        raise InputError(
            f"{run.trainer(step)}: the optimizer's state of step {step} is not there (train.keep),"
            f" so the step cannot be trained again; go back to step {nearest}"
        )
    removed = [n for n in run.steps("policy") if n > step]
    run.metrics.unlink(missing_ok=True)  # made anew from the steps' own
    for merged in (run.root / "merged").glob("step-*"):
        if (step_number(merged.name) or 0) > step:
            remove_folder(merged)
    # What was imported stays, to be scored by another policy.
    for scores in (run.root / "scores").glob("step-*-import"):
        if int(scores.name.split("-")[1]) > step:
            remove_folder(scores)
    for number in sorted({n for kind in _LATER for n in run.steps(kind) if n > step}, reverse=True):
        for kind in _LATER:
            _remove(run, kind, number)
    for kind in ("curated", "scores", "verdicts"):
        _remove(run, kind, step)
    for file in (run.root / "metrics" / step_name(step)).glob("*.json"):
        if not file.name.startswith("evaluate-"):
            file.unlink()
    return removed


def _remove(run: RunDir, kind: str, step: int) -> None:
    folder = run.root / kind / step_name(step)
    if folder.is_dir():
        remove_folder(folder)
    folder.with_name(f"{folder.name}.parquet").unlink(missing_ok=True)
