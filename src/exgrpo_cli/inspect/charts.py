"""Charts for the pages: metrics over steps as HTML figures with inline SVG.

The SVG stretches to the page, with strokes that keep their width, and the tick labels are HTML over
it, so that text keeps its size on a phone. Colours are classes (``c0`` .. ``c5`` and others) of
``page.css``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

Point = tuple[float, float]
"""(step, value); or what was spent up to the step in the place of its number."""

Series = tuple[str, list[Point]]
"""A legend's label, and its points in step order."""

Band = list[tuple[float, float, float]]
"""(step, low, high)."""


# SVG coordinates of a plot; it is stretched to its box, and strokes keep their width.
_WIDTH, _HEIGHT = 1000.0, 400.0


_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))

_DOTS = 40
"""More points than these are smoothed."""


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover low..high, the first at or below low, the last at or above high."""
    if high - low <= max(1e-12 * max(abs(low), abs(high)), 1e-100):
        pad = abs(low) * 0.1
        low, high = low - pad, high + (pad or 1.0)
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    unit = next(m for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999) * magnitude
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return [i * unit for i in range(first, last + 1)]


def number(value: float) -> str:
    """A short number for labels: 0.25, 3, 1,200, 250k, 3e-07."""
    size = abs(value)
    if size >= 100_000:
        return _in_unit(value, *_unit(float(f"{size:.3g}")), digits=3)
    if size >= 1_000:
        return f"{value:,.0f}"
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.2g}" if size < 0.001 else f"{value:.3g}"


def _unit(size: float) -> tuple[float, str]:
    """The unit of numbers so large."""
    return next(((unit, name) for unit, name in _UNITS if size >= unit), (1.0, ""))


def _in_unit(value: float, unit: float, name: str, digits: int = 6) -> str:
    return f"{value / unit:.{digits}g}{name}" if value else "0"


def _labelled(ticks: Sequence[float], text: Callable[[float], str]) -> list[tuple[float, str]]:
    """The ticks of an axis, large numbers all in the unit of the largest: 0, 50k, 100k."""
    size = max(map(abs, ticks), default=0.0)
    if text is number and size >= 100_000:
        unit, name = _unit(size)
        return [(t, _in_unit(t, unit, name)) for t in ticks]
    return [(t, text(t)) for t in ticks]


def percent(value: float) -> str:
    """A share in percent, to three digits: 24%, 23.7%, 0.2%."""
    return f"{100 * value:.3g}%"


def seconds(value: float) -> str:
    """A time in seconds with its unit."""
    return f"{number(value)} s"


def _x_scale(steps: Sequence[float]) -> Callable[[float], float]:
    first, last = min(steps), max(steps)
    if first == last:
        return lambda _: _WIDTH / 2
    return lambda step: (step - first) / (last - first) * _WIDTH


def x_ticks(first: float, last: float, axis: str = "step") -> list[tuple[float, str]]:
    """Whole steps within first..last, or what stands in their place, with their labels."""
    ticks = [first]
    if first != last:
        ticks = [t for t in _ticks(first, last, 5) if first <= t <= last and t == round(t)]
    return _labelled(ticks, "{:.0f}".format if axis == "step" else number)


def _frame(
    title: str,
    note: str,
    label: str,
    body: str,
    legend: Sequence[tuple[str, str]],
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    wide: bool = False,
    axis: str = "step",
) -> str:
    """A chart: caption, legend, and the SVG with its tick labels over it.

    Args:
        label: the same for those who do not see it, with the numbers.
        body: SVG elements in ``_WIDTH`` times ``_HEIGHT``.
        legend: (colour class, label).
        x_ticks: (x, text).
        y_ticks: (y, text); each gets a grid line.
        axis: what lies on the x axis, in a short word.
    """
    grid = "".join(f'<path class="grid" d="M0 {y:.1f}H{_WIDTH:.0f}"></path>' for y, _ in y_ticks)
    ys = "".join(
        f'<span class="y" style="top:{100 * y / _HEIGHT:.2f}%">{escape(t)}</span>'
        for y, t in y_ticks
    )
    xs = "".join(
        f'<span class="x" style="left:{100 * x / _WIDTH:.2f}%">{escape(t)}</span>'
        for x, t in x_ticks
    )
    keys = "".join(f'<li class="{css}">{escape(text)}</li>' for css, text in legend)
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3>'
        f"<p>{escape(note)}</p></figcaption>"
        + (f'<ul class="legend">{keys}</ul>' if legend else "")
        + f'<div class="plot"><svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}"'
        f' preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{grid}{body}</svg>'
        f'<div aria-hidden="true">{ys}{xs}<span class="step">{axis}</span></div></div></figure>'
    )


def line_chart(
    title: str,
    note: str,
    lines: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    bounds: tuple[float | None, float | None] = (None, None),
    text: Callable[[float], str] = number,
    mark: tuple[float, str] | None = None,
    wide: bool = False,
    axis: str = "step",
) -> str:
    """Lines over steps as an HTML figure; empty when no series has a point.

    Up to 40 points are drawn as dots with their values as tooltips. Where a series is longer, all
    are drawn thin, with their moving mean over a twentieth of their points on top, and the note
    says so.

    Args:
        lines: the series; empty ones are left out, and the others keep their colours.
        bands: an interval of each series, in the same order.
        bounds: the axis reaches at least these values.
        mark: a vertical line: (step, label).
        axis: ``step``, or the unit of what stands in its place.
    """
    shown = [(i, label, points) for i, (label, points) in enumerate(lines) if points]
    if not shown:
        return ""
    steps = [step for _, _, points in shown for step, _ in points]
    values = [value for _, _, points in shown for _, value in points]
    values += [v for interval in bands for _, low, high in interval for v in (low, high)]
    values += [v for v in bounds if v is not None]
    ticks = _ticks(min(values), max(values))
    x = _x_scale(steps)

    def y(value: float) -> float:
        return _HEIGHT * (1 - (value - ticks[0]) / (ticks[-1] - ticks[0]))

    body, label_parts = [], []
    smooth = any(len(points) > _DOTS for _, _, points in shown)
    if smooth:
        note += "; thick: moving mean over a twentieth of the run, thin: as measured"
    if mark is not None:
        note += f"; dashed: {mark[1]}"
    if mark is not None and min(steps) < mark[0] <= max(steps):
        body.append(
            f'<path class="mark" d="M{x(mark[0]):.1f} 0V{_HEIGHT:.0f}">'
            f"<title>{escape(mark[1])}</title></path>"
        )
    for i, label, points in shown:
        css = _colour(i)
        if i < len(bands) and bands[i]:
            body.append(_band_path(bands[i], x, y, css))
        if smooth and len(points) > 1:
            body.append(f'<path class="line raw {css}" d="{_path(_thin(points), x, y)}"></path>')
            mean = _moving_mean(points, max(3, len(points) // 20))
            body.append(f'<path class="line {css}" d="{_path(_thin(mean), x, y)}"></path>')
        else:
            body.append(f'<path class="line {css}" d="{_path(points, x, y)}"></path>')
            interval = {s: (low, high) for s, low, high in (bands[i] if i < len(bands) else [])}
            dot = "dot" if len(points) <= 12 else "dot small"
            for step, value in points:
                tip = f"{label}, {_place(step, axis)}: {text(value)}"
                if step in interval:
                    tip += f" ({text(interval[step][0])} to {text(interval[step][1])})"
                body.append(
                    f'<path class="{dot} {css}" d="M{x(step):.1f} {y(value):.1f}h0.01">'
                    f"<title>{escape(tip)}</title></path>"
                )
        label_parts.append(_in_words(label, points, text, axis))
    return _frame(
        title,
        note,
        f"{title}. " + "; ".join(label_parts),
        "".join(body),
        [(_colour(i), label) for i, label, _ in shown] if len(lines) > 1 else [],
        [(x(t), label) for t, label in x_ticks(min(steps), max(steps), axis)],
        [(y(t), label) for t, label in _labelled(ticks, text)],
        wide,
        axis,
    )


def stack_chart(
    title: str,
    note: str,
    layers: Sequence[tuple[str, str, list[Point]]],
    *,
    text: Callable[[float], str] = number,
) -> str:
    """Layers stacked from below, each step a column; empty when there is nothing to stack.

    Where there are more than 100 steps, neighbouring ones share a column, which shows their mean.

    Args:
        layers: (colour class, label, points), the lowest first; a missing step counts as 0.
    """
    shown = [layer for layer in layers if layer[2]]
    steps = sorted({step for _, _, points in shown for step, _ in points})
    if not steps:
        return ""
    gap = min((b - a for a, b in pairwise(steps)), default=1.0)
    margin = gap / 2 if len(steps) > 1 else 2 * gap  # a single column does not fill the plot
    first, last = steps[0] - margin, steps[-1] + margin
    size = -(-len(steps) // 100)
    columns = [steps[i : i + size] for i in range(0, len(steps), size)]
    heights = []
    for _, _, points in shown:
        values = dict(points)
        heights.append([sum(values.get(step, 0.0) for step in c) / len(c) for c in columns])
    top = max(map(sum, zip(*heights, strict=True)))
    if top <= 0.0:
        return ""
    ticks = _ticks(0.0, top)

    def x(step: float) -> float:
        return (step - first) / (last - first) * _WIDTH

    def y(value: float) -> float:
        return max(_HEIGHT * (1 - value / ticks[-1]), 0.0)

    floor = [0.0] * len(columns)
    body = []
    for (css, label, points), layer in zip(shown, heights, strict=True):
        path = []
        for i, (column, height) in enumerate(zip(columns, layer, strict=True)):
            low, floor[i] = floor[i], floor[i] + height
            path.append(
                f"M{x(column[0] - gap / 2):.1f} {y(low):.1f}V{y(floor[i]):.1f}"
                f"H{x(column[-1] + gap / 2):.1f}V{y(low):.1f}z"
            )
        tip = escape(_in_words(label, points, text))
        body.append(f'<path class="area {css}" d="{"".join(path)}"><title>{tip}</title></path>')
    words = "; ".join(_in_words(label, points, text) for _, label, points in shown)
    return _frame(
        title,
        note,
        f"{title}. {words}",
        "".join(body),
        [(css, label) for css, label, _ in reversed(shown)],
        [(x(t), label) for t, label in x_ticks(steps[0], steps[-1])],
        [(y(t), label) for t, label in _labelled(ticks, text)],
        wide=True,
    )


def timeline_chart(
    title: str, note: str, lanes: Sequence[tuple[str, list[tuple[float, float, str]]]]
) -> str:
    """Lanes of bars over time as an HTML figure; empty when there is no bar. A lane is a label and
    its bars, the highest lane first; a bar is its begin and end in seconds, and what it is."""
    bars = [bar for _, own in lanes for bar in own]
    if not bars:
        return ""
    first, last = min(bar[0] for bar in bars), max(bar[1] for bar in bars)
    whole = max(last - first, 1e-9)
    size, unit = (3600, "h") if whole > 10_800 else (60, "min") if whole > 180 else (1, "s")
    high = _HEIGHT / len(lanes)
    body = []
    for lane, (_, own) in enumerate(lanes):
        for began, ended, what in own:
            left, right = ((at - first) / whole * _WIDTH for at in (began, ended))
            body.append(
                f'<path class="area {_colour(lane)}" d="M{left:.1f} {(lane + 0.15) * high:.1f}'
                f'v{0.7 * high:.1f}H{max(right, left + 1):.1f}v{-0.7 * high:.1f}z">'
                f"<title>{escape(what)}</title></path>"
            )
    ticks = [t for t in _ticks(0.0, whole / size, 6) if t * size <= whole]
    return _frame(
        title,
        note,
        f"{title}. {note}",
        "".join(body),
        [],
        [(t * size / whole * _WIDTH, number(t)) for t in ticks],
        [((lane + 0.5) * high, label) for lane, (label, _) in enumerate(lanes)],
        wide=True,
        axis=unit,
    )


def _path(points: Iterable[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)


def _band_path(
    interval: Band, x: Callable[[float], float], y: Callable[[float], float], css: str
) -> str:
    if len(interval) == 1:  # an area of one step has no width; a whisker has
        step, low, high = interval[0]
        return f'<path class="whisker {css}" d="M{x(step):.1f} {y(low):.1f}V{y(high):.1f}"></path>'
    upper = [(step, high) for step, _, high in interval]
    lower = [(step, low) for step, low, _ in reversed(interval)]
    return f'<path class="band {css}" d="{_path(upper + lower, x, y)}z"></path>'


def _moving_mean(points: list[Point], window: int) -> list[Point]:
    """The mean of each point and its neighbours on both sides, ``window`` in all.

    Towards the ends the window shrinks on both sides alike, so that a trend is not bent there.
    """
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    found = []
    for i, (step, _) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        found.append((step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return found


def _thin(points: list[Point]) -> list[Point]:
    """Neighbouring points averaged, so that no path has more than 800."""
    size = -(-len(points) // 800)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]


def _in_words(
    label: str, points: list[Point], text: Callable[[float], str], axis: str = "step"
) -> str:
    first, last = (f"{text(v)} at {_place(at, axis)}" for at, v in (points[0], points[-1]))
    return f"{label}: {last}" if len(points) == 1 else f"{label}: {first}, {last}"


def _place(at: float, axis: str) -> str:
    return f"step {at:.0f}" if axis == "step" else f"{number(at)} {axis}"


def _colour(index: int) -> str:
    """The class of a line: six colours, and the same again dashed, and dotted."""
    return f"c{index % 6}" + ("", " dashed", " dotted")[index // 6 % 3]
