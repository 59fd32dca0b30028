"""Which of a run's policies stay on disk. The others are removed as soon as nothing needs them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import REMOVED, RunDir
from exgrpo_cli.tables import remove_folder, write_text

KEEP = "KEEP"
"""A policy with a file of this name is never removed: another run begins from it, or somebody has
put it there."""


def removable(
    policies: Collection[int],
    *,
    recent: int,
    every: int,
    evaluated: Mapping[str, Mapping[int, float]],
    needed: Collection[int] = (),
) -> list[int]:
    """The policies that may go.

    Args:
        recent: how many of the last steps' stay, at least 1.
        every: those whose step is a multiple of it stay; 0: none for that reason.
        evaluated: accuracies, by problem set and step. Of each set the best one that is there
            stays; of several equally good ones the earliest.
        needed: those that something else still needs.
    """
    newest = max(policies, default=0)
    kept = {step for step in policies if step > newest - recent or (every and step % every == 0)}
    for accuracies in evaluated.values():
        there = sorted(accuracies.keys() & set(policies))
        kept |= {max(there, key=accuracies.__getitem__)} if there else set()
    return sorted(set(policies) - kept - set(needed))


def prune_policies(run: RunDir, recipe: Recipe, after: int) -> list[int]:
    """Remove the policies that need not stay, and with each its optimizer state.

    A removed policy's folder stands for the trained step, with the file :data:`REMOVED` in it. That
    comes first, so a policy of which a kill has left a part is none, and goes the next time.

    Args:
        recipe: ``train.keep_policies``, ``train.keep_every``; ``evaluate`` and ``model``, whose
            policies are needed.
        after: the step whose policy was trained or evaluated; where it is not the newest one, an
            earlier step is being trained again, and nothing is removed.
    """
    made = run.steps("policy")
    if not made or made[-1] != after:
        return []
    there = [step for step in made if not run.is_removed(step)]
    gone = removable(
        there,
        recent=max(recipe.train.keep_policies, recipe.loop.lag + 1),  # sampling may need them
        every=recipe.train.keep_every,
        evaluated=_accuracies(run, there),
        needed=[step for step in there if _is_needed(run, recipe, step)],
    )
    trainers = set(run.steps("trainer"))
    for step in sorted({*made} - {*there} | {*gone}):
        _remove(run.policy(step), "removed to save disk (train.keep_policies)")
        if step in trainers:
            remove_folder(run.trainer(step))
    return gone


def _accuracies(run: RunDir, steps: Collection[int]) -> dict[str, dict[int, float]]:
    """pass@1 by evaluated set and step."""
    found: dict[str, dict[int, float]] = {}
    for step in steps:
        for file in run.evaluation(step, "").glob("*/summary.json"):
            with contextlib.suppress(ValueError, LookupError, TypeError):
                summary = json.loads(file.read_text(encoding="utf-8"))
                found.setdefault(file.parent.name, {})[step] = float(summary["overall"]["pass@1"])
    return found


def _is_needed(run: RunDir, recipe: Recipe, step: int) -> bool:
    """Whether an evaluation of the policy is still to come, or another policy is based on it."""
    policy = run.policy(step)
    missing = any(not run.is_evaluated(step, name) for name in recipe.evaluate.problems)
    used = [recipe.model.path, recipe.objective.reference]
    return (
        (recipe.evaluates(step) and missing)
        or (policy / KEEP).exists()
        or any(Path(path).absolute() == policy.absolute() for path in used)
    )


def keep_policy(path: str) -> None:
    """Have a policy stay that another run begins from, where the path is a run's policy."""
    folder = Path(path)
    if folder.parent.name == "policy" and folder.is_dir() and not (folder / KEEP).exists():
        with contextlib.suppress(OSError):  # somebody else's run
            (folder / KEEP).touch()


def _remove(policy: Path, why: str) -> None:
    """Empty a policy's folder but for the note on why; its time stays, which make goes by."""
    if os.listdir(policy) == [REMOVED]:  # noqa: PTH208 (a thousand times, from a slow disk)
        return
    times = policy.stat()
    if not (policy / REMOVED).exists():
        write_text(policy / REMOVED, f"{why}\n")
    for entry in policy.iterdir():
        with contextlib.suppress(OSError):  # another process removes it too, or still reads it
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != REMOVED:
                entry.unlink()
    os.utime(policy, ns=(times.st_atime_ns, times.st_mtime_ns))
