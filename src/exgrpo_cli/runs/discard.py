"""Going back to an earlier step: what was made from it, and after it, is removed."""

from __future__ import annotations

import shutil

from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.tables import remove_folder

_FILES = ("plan", "curated")
_FOLDERS = ("rollouts", "verdicts", "scores", "policy", "trainer", "evaluations", "metrics")


def discard_after(run: RunDir, step: int) -> list[int]:
    """Remove all that a run made from a step's rollouts, and all later steps.

    The rollouts of the step stay (they are what is sampled again), as do its plan, its policy and
    its evaluations. The newest goes first, so that a kill leaves a run that ends earlier. The
    tables ``experience`` and ``questions`` are derived anew by the next curate.

    Returns:
        The steps whose policies were removed.
    """
    steps = sorted({n for kind in (*_FILES, *_FOLDERS) for n in run.steps(kind) if n >= step})
    removed = [n for n in run.steps("policy") if n > step]
    for number in reversed(steps):
        later = number > step
        for kind in reversed(_FOLDERS):
            folder = run.root / kind / step_name(number)
            if folder.is_dir() and (later or kind in ("verdicts", "scores", "metrics")):
                remove_folder(folder)
        for kind in _FILES:
            if later or kind == "curated":
                (run.root / kind / f"{step_name(number)}.parquet").unlink(missing_ok=True)
    for merged in (run.root / "merged").glob("step-*"):
        if int(merged.name.removeprefix("step-")) > step:
            shutil.rmtree(merged)
    run.metrics.unlink(missing_ok=True)  # made anew from the steps' own
    return removed
