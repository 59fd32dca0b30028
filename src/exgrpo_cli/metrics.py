"""The metrics of a run as series, for the report, the status screen and the learning curve."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import interval_of
from exgrpo_cli.inspect.charts import Band, Point
from exgrpo_cli.rundir import RunDir

Metrics = Sequence[Mapping[str, Any]]
"""Lines of ``metrics.jsonl``."""

STAGES = ("rollout", "verify", "score", "curate", "train")


def learning_curve(metrics: Metrics, width: int = 40) -> str:
    """Held-out accuracy by step, for the terminal; without evaluations, the rollouts' success rate.

    A bar is solid up to the interval's low end, and darker up to the estimate::

        heldout pass@1 [95% interval: from the end of █ to the end of ░]
        step     0  0.245 [0.214, 0.277]  █████████▓░
        step    10  0.472 [0.436, 0.509]  █████████████████▓▓░
    """
    blocks = []
    for name in evaluation_names(metrics):
        prefix = f"eval/{name}/pass@1"
        lines = [f"{name} pass@1 [95% interval: from the end of █ to the end of ░]"]
        bounds = {step: (low, high) for step, low, high in band(metrics, prefix)}
        for step, value in _spread(series(metrics, prefix)):
            low, high = bounds.get(step, (value, value))
            lines.append(
                f"step {step:5.0f}  {value:.3f} [{low:.3f}, {high:.3f}]"
                f"  {_bar(value, low, high, width)}"
            )
        blocks.append("\n".join(lines))
    if not blocks:
        points = _spread(series(metrics, "success_rate"))
        if points:
            lines = [f"step {s:5.0f}  {v:.3f}  {_bar(v, v, v, width)}".rstrip() for s, v in points]
            blocks.append("\n".join(["success rate of the rollouts", *lines]))
    return "\n\n".join(blocks)


def _bar(value: float, low: float, high: float, width: int) -> str:
    solid, reach = round(low * width), round(high * width)
    mark = min(max(round(value * width), solid), reach)
    return "█" * solid + "▓" * (mark - solid) + "░" * (reach - mark)


def _spread(points: list[Point]) -> list[Point]:
    """At most 30 of the points, evenly spread, the first and the last among them."""
    if len(points) <= 30:
        return points
    return [points[round(i * (len(points) - 1) / 29)] for i in range(30)]


def series(metrics: Metrics, name: str | tuple[str, str]) -> list[Point]:
    """(step, value) of a metric, where it is there and finite, in step order; of two metrics the
    first one's share of the second."""
    if not isinstance(name, str):
        part, whole = (dict(series(metrics, one)) for one in name)
        return [(step, value / whole[step]) for step, value in part.items() if whole.get(step)]
    found = []
    for line in metrics:
        value = line.get(name)
        if isinstance(value, bool | int | float) and math.isfinite(value):
            found.append((float(line["step"]), float(value)))
    return sorted(found)


def band(metrics: Metrics, name: str) -> Band:
    """(step, low, high) of a metric that has ``NAME_low`` and ``NAME_high``."""
    high = dict(series(metrics, f"{name}_high"))
    return [(step, low, high[step]) for step, low in series(metrics, f"{name}_low") if step in high]


def evaluation_names(metrics: Metrics, by_source: bool = False) -> list[str]:
    """The names in ``eval/NAME/pass@1``, in order of appearance: of whole sets, or the
    ``NAME/SOURCE`` ones."""
    suffix = "/pass@1"
    names = dict.fromkeys(
        key.removeprefix("eval/").removesuffix(suffix)
        for line in metrics
        for key in line
        if key.startswith("eval/") and key.endswith(suffix)
    )
    return [n for n in names if any(n.startswith(f"{s}/") for s in names) == by_source]


@dataclass(frozen=True)
class Span:
    """When a stage of a step was at work, seconds since the epoch."""

    stage: str
    """A stage's name, or ``evaluate``."""
    step: int
    began: float
    ended: float


def spans(metrics: Metrics) -> list[Span]:
    """The stages of all steps, where it was recorded when they were at work, in order of time."""
    found = []
    for line in metrics:
        for name, began in line.items():
            ended = line.get(f"{name.removesuffix('_began')}_ended")
            if name.startswith("time/") and name.endswith("_began") and began and ended:
                stage = name.removeprefix("time/").removesuffix("_began").split("/")[0]
                found.append(Span(stage, int(line["step"]), float(began), float(ended)))
    return sorted(found, key=lambda span: span.began)


def busy(spans: Iterable[Span]) -> Callable[[float], float]:
    """Seconds in which at least one of some stages, in order of time, was at work, up to a time:
    the function takes it in seconds since the epoch (``math.inf``: all of it)."""
    begins: list[float] = []
    ends: list[float] = []
    for span in spans:
        if ends and span.began <= ends[-1]:
            ends[-1] = max(ends[-1], span.ended)
        else:
            begins.append(span.began)
            ends.append(span.ended)
    sums = list(accumulate((b - a for a, b in zip(begins, ends, strict=True)), initial=0.0))

    def until(at: float) -> float:
        count = bisect(begins, at)
        return sums[count] - max(ends[count - 1] - at, 0.0) if count else 0.0

    return until


def spent(metrics: Metrics) -> dict[str, list[Point]]:
    """What a run had spent before each step, of all steps before it together.

    Returns:
        (step, sum) from step 0 up to the first step that has no such number, of ``tokens`` (that
        were sampled), ``questions`` (fresh ones, one that comes again counted again), ``updates``
        of the optimizer and ``seconds`` in the stages (evaluations are left out; those in which
        several were at work count once).
    """
    lines = {int(line["step"]): line for line in metrics}
    stages_at_work = [span for span in spans(metrics) if span.stage in STAGES]
    trained = {span.step: span.ended for span in stages_at_work if span.stage == "train"}
    worked = busy(stages_at_work)

    def tokens(step: int, line: Mapping[str, Any]) -> float:
        rows = line["train/rows"] - line["train/replayed_rows"]
        return float(line["rollout/tokens_mean"] * rows)

    def questions(step: int, line: Mapping[str, Any]) -> float:
        groups = line["train/groups"]  # the first step has no plan: all of them are fresh
        return float(lines[step - 1]["plan/fresh"] if step else groups)

    def seconds(step: int, line: Mapping[str, Any]) -> float:
        if line.get("train/lag"):  # the stages overlap
            return worked(trained[step]) - worked(trained[step - 1])
        stages = {f"time/{stage}": 0.0 for stage in STAGES if stage not in ("rollout", "train")}
        optional = sum(line.get(name) or default for name, default in stages.items())
        return float(line["time/rollout"] + line["time/train"] + optional)

    found = {}
    for name, cost in {
        "tokens": tokens,
        "questions": questions,
        "updates": lambda step, line: float(line["train/updates"]),
        "seconds": seconds,
    }.items():
        points = [(0.0, 0.0)]
        for step in range(len(lines)):
            try:
                points.append((step + 1.0, points[-1][1] + cost(step, lines[step])))
            except (KeyError, TypeError):  # not recorded, or null
                break
        found[name] = points
    return found


def replay_start(metrics: Metrics) -> int | None:
    """The first step whose metrics say that replay has started."""
    return next((int(step) for step, value in series(metrics, "replay/started") if value), None)


def read_evaluations(run: RunDir) -> list[tuple[str, dict[str, Any]]]:
    """(name, summary) of every finished evaluation, in order of name and step."""
    found = []
    for file in sorted((run.root / "evaluations").glob("step-*/*/summary.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            interval_of(summary["overall"], 1)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: not an evaluation's summary; remove it") from error
        found.append((file.parent.name, summary))
    return sorted(found, key=lambda pair: (pair[0], pair[1]["step"]))
