"""Arms of an experiment against each other, in numbers: accuracies, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import t_half_width
from exgrpo_cli.inspect.arms import Arm, Member, differing
from exgrpo_cli.inspect.charts import Band, Point
from exgrpo_cli.metrics import evaluation_names, series
from exgrpo_cli.tables import read_table

COSTS = ("tokens", "questions", "updates", "seconds")
"""What :func:`exgrpo_cli.metrics.spent` counts."""

PLACES = {
    "step": "at the last step that all runs have",
    "tokens": "at equal generated tokens: as many as every run has",
    "last": "at each run's own last step",
    "best": "where its mean first reaches the best of the baseline",
}
"""Where arms are compared, in words."""

Place = Callable[[Arm, Member], float | None]
"""The step of a run at which it is compared; between two evaluations it is interpolated."""


def compare(arms: Sequence[Arm], baseline: str | None = None) -> dict[str, Any]:
    """The figures of some arms, by evaluated set, and their differences to one of them.

    Args:
        baseline: the name of the arm that the others are compared with; default the first.

    Returns:
        ``baseline``; ``arms`` (``name``, ``runs``, ``seeds``, ``steps`` of each run); ``differing``
        (see :func:`exgrpo_cli.inspect.arms.differing`); ``warnings`` in words; ``figures``: of each
        ``set``, place (``at``, see :data:`PLACES`) and ``arm`` a row with ``seeds`` (how many),
        ``step`` (lowest and highest), ``pass@1`` (mean over seeds) and half of its 95% t interval
        ``pass@1_half`` (None for a single seed), ``difference`` and ``difference_half`` over the
        ``pairs`` of runs of the same seed (None without any), and the mean of what was spent: see
        :data:`COSTS`.
    """
    names = [arm.name for arm in arms]
    if baseline is not None and baseline not in names:
        raise InputError(f"--baseline {baseline}: no such arm; there are: {'; '.join(names)}")
    base = arms[names.index(baseline) if baseline is not None else 0]
    sets = evaluated_sets(arms)
    missing = [] if sets else ["no run has an evaluation yet: there are no accuracies"]
    return {
        "baseline": base.name,
        "arms": [
            {
                "name": arm.name,
                "runs": [str(member.run.root) for member in arm.members],
                "seeds": [member.seed for member in arm.members],
                "steps": [int(member.metrics[-1]["step"]) for member in arm.members],
            }
            for arm in arms
        ],
        "differing": differing(arms),
        "warnings": [
            *missing,
            *_nothing_to_differ_from(arms, base),
            *_doubled(arms),
            *_other_problems(arms),
        ],
        "figures": [
            {"at": at, "set": name, **row}
            for name in sets
            for at, place in _places(arms, base, name).items()
            for row in _rows(arms, base, name, place, at)
        ],
    }


def _nothing_to_differ_from(arms: Sequence[Arm], base: Arm) -> Iterator[str]:
    for name in evaluated_sets(arms):
        if not any(accuracy(member, name) for member in base.members):
            yield f"{base.name}: never evaluated on {name}; there are no differences to it"


def _doubled(arms: Iterable[Arm]) -> Iterator[str]:
    for arm in arms:
        for seed, count in Counter(member.seed for member in arm.members).items():
            if count > 1:
                yield f"{arm.name}: {count} runs of seed {seed} count as their mean"


def _other_problems(arms: Iterable[Arm]) -> Iterator[str]:
    roots = [member.run.root for arm in arms for member in arm.members]
    for name in evaluated_sets(arms):
        files = [root / "evaluations" / f"{name}.parquet" for root in roots]
        contents = {file.read_bytes(): file for file in files if file.exists()}
        if len(contents) > 1:  # other versions write the same problems in other bytes
            first, *others = (
                read_table("problems", file).sort("problem_id") for file in contents.values()
            )
            if not all(first.equals(other) for other in others):
                yield f"{name}: not the same problems in all runs; accuracies cannot be compared"


def evaluated_sets(arms: Iterable[Arm]) -> list[str]:
    """The sets that any run was evaluated on, in order of appearance."""
    return evaluation_names([line for arm in arms for m in arm.members for line in m.metrics])


def accuracy(member: Member, name: str) -> list[Point]:
    """(step, pass@1) of a run on a set."""
    return series(member.metrics, f"eval/{name}/pass@1")


def mean_curve(
    arm: Arm, points: Callable[[Member], list[Point]], axis: str = "step", *, whole: bool = False
) -> tuple[list[Point], Band]:
    """An arm's mean over the runs that have a step, and the lowest and highest of them.

    Args:
        points: (step, value) of a run.
        axis: ``step``, or one of :data:`COSTS`: then the mean of what they had spent at the step.
        whole: only steps that all of the arm's runs have.
    """
    values: dict[float, list[Point]] = {}
    for member in arm.members:
        place = dict(member.spent[axis]) if axis != "step" else None
        for step, value in points(member):
            at = step if place is None else place.get(step)
            if at is not None:
                values.setdefault(step, []).append((at, value))
    line, band = [], []
    for _, found in sorted(values.items()):
        if not whole or len(found) == len(arm.members):
            at = sum(x for x, _ in found) / len(found)
            ys = [y for _, y in found]
            line.append((at, sum(ys) / len(ys)))
            band.append((at, min(ys), max(ys)))
    return line, band if len(arm.members) > 1 else []


def _places(arms: Sequence[Arm], base: Arm, name: str) -> dict[str, Place]:
    """Where the arms are compared on a set; what some run does not have is left out."""
    curves = [points for arm in arms for m in arm.members if (points := accuracy(m, name))]
    found: dict[str, Place] = {}
    if not curves:
        return found
    shared = set.intersection(*({step for step, _ in points} for points in curves))
    if shared:
        found["step"] = lambda arm, member: max(shared)
    if not shared or any(points[-1][0] > max(shared) for points in curves):
        found["last"] = lambda arm, member: accuracy(member, name)[-1][0]
    if len(arms) == 1:  # there is nothing to be equal to
        return found
    spent = [
        dict(m.spent["tokens"]).get(points[-1][0], 0.0)
        for arm in arms
        for m in arm.members
        if (points := accuracy(m, name))
    ]
    tokens = min(spent, default=0.0)
    if tokens > 0:
        found["tokens"] = lambda arm, member: _step_at(member, tokens)
    best = max((value for _, value in _mean(base, name)), default=None)
    if best is not None:
        found["best"] = lambda arm, member: _first(_mean(arm, name), best)
    return found


def _mean(arm: Arm, name: str) -> list[Point]:
    return mean_curve(arm, lambda member: accuracy(member, name), whole=True)[0]


def _step_at(member: Member, tokens: float) -> float:
    steps, sums = zip(*member.spent["tokens"], strict=True)
    return float(np.interp(tokens, sums, steps))


def _first(line: Sequence[Point], value: float) -> float | None:
    """Where a line first reaches a value."""
    before: Point | None = None
    for x, y in line:
        if y >= value:
            if before is None:
                return x
            return before[0] + (x - before[0]) * (value - before[1]) / (y - before[1])
        before = (x, y)
    return None


def _rows(arms: Sequence[Arm], base: Arm, name: str, place: Place, at: str) -> list[dict[str, Any]]:
    """A row an arm that has the set; without numbers where it does not come to the place."""
    by_arm = {arm.name: _by_seed(arm, name, place) for arm in arms}
    rows = []
    for arm in arms:
        if not any(accuracy(member, name) for member in arm.members):
            continue
        own, against = by_arm[arm.name], by_arm[base.name]
        values = [reading["pass@1"] for reading in own.values()]
        pairs = [
            own[seed]["pass@1"] - against[seed]["pass@1"]
            for seed in own
            if seed in against and arm is not base and at != "best"
        ]
        steps = [reading["step"] for reading in own.values()]
        rows.append(
            {
                "arm": arm.name,
                "seeds": len(own),
                "step": [min(steps), max(steps)] if steps else None,
                "pass@1": _average(values),
                "pass@1_half": t_half_width(values),
                "difference": _average(pairs),
                "difference_half": t_half_width(pairs),
                "pairs": len(pairs),
                **{cost: _average([r[cost] for r in own.values() if cost in r]) for cost in COSTS},
            }
        )
    return rows


def _by_seed(arm: Arm, name: str, place: Place) -> dict[int, dict[str, float]]:
    """The reading of each seed at a place; the mean where several runs have the same seed."""
    found: dict[int, list[dict[str, float]]] = {}
    for member in arm.members:
        points = accuracy(member, name)
        step = place(arm, member) if points else None
        if step is not None and step >= points[0][0]:
            found.setdefault(member.seed, []).append(_reading(member, points, step))
    return {
        seed: {
            key: sum(r[key] for r in some) / len(some)
            for key in some[0]
            if all(key in r for r in some)
        }
        for seed, some in found.items()
    }


def _reading(member: Member, points: Sequence[Point], step: float) -> dict[str, float]:
    """A run's accuracy at a step, and what it had spent, where that is known so far."""
    curves = {"pass@1": points, **{cost: member.spent[cost] for cost in COSTS}}
    found = {"step": step}
    for key, curve in curves.items():
        if step <= curve[-1][0]:
            steps, values = zip(*curve, strict=True)
            found[key] = float(np.interp(step, steps, values))
    return found


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
