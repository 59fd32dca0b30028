"""A comparison as tables, an HTML page, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.inspect import curves
from exgrpo_cli.inspect.arms import Arm, Member
from exgrpo_cli.inspect.charts import Point, line_chart, number, percent, seconds, x_ticks
from exgrpo_cli.inspect.compare import COSTS, PLACES, accuracy, evaluated_sets, mean_curve
from exgrpo_cli.inspect.page import Table, plain, render
from exgrpo_cli.metrics import STAGES, series
from exgrpo_cli.progress import duration
from exgrpo_cli.tables import atomic_path, write_text
from exgrpo_cli.terminal import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

_AXES = {
    "tokens": "generated tokens",
    "step": "steps",
    "questions": "fresh questions",
    "seconds": "seconds in the stages",
}
_BAND = "pass@1, mean over the seeds that have come so far; band: lowest to highest"


def notes(found: Mapping[str, Any]) -> list[str]:
    """What the tables' figures are, in sentences."""
    against = found["baseline"]
    return [
        "± is half of a 95% interval over seeds (Student's t); a single seed has none.",
        *(
            [f"Differences are to {against}, in points, paired by seed; (n): over n pairs alone."]
            if len(found["arms"]) > 1
            else []
        ),
        "tokens: all that were sampled for training; questions: fresh ones, repeats counted.",
        "time: of the stages, without evaluations; between evaluations all is interpolated.",
        *found["warnings"],
    ]


def tables(found: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """The figures of :func:`exgrpo_cli.inspect.compare.compare`: a table a set and place."""
    head = ["arm", "seeds", "step", "pass@1", "difference", *COSTS[:-1], "time"]
    made: dict[str, Table] = {}
    seeds = {
        (row["set"], row["at"]): row["seeds"]
        for row in found["figures"]
        if row["arm"] == found["baseline"]
    }
    for row in found["figures"]:
        where = PLACES[row["at"]].replace("the baseline", found["baseline"])
        table = made.setdefault(f"{row['set']}: {where}", {"head": head, "body": []})
        table["body"].append(_cells(row, seeds.get((row["set"], row["at"]), 0)))
    return list(made.items())


def _cells(row: Mapping[str, Any], base_seeds: int) -> list[str]:
    """A row of a table, of an arm whose baseline has so many seeds."""
    alone = 0 < row["pairs"] < max(row["seeds"], base_seeds)
    pairs = f" ({row['pairs']})" * alone
    steps = dict.fromkeys(f"{step:.1f}".removesuffix(".0") for step in row["step"] or [])
    spent = ["" if row[cost] is None else number(row[cost]) for cost in COSTS[:-1]]
    return [
        row["arm"],
        str(row["seeds"] or ""),
        "–".join(steps),
        _with_half(row["pass@1"], row["pass@1_half"], "{:.1%}") or "not reached",
        _with_half(row["difference"], row["difference_half"], "{:+.1%}").replace("%", "") + pairs,
        *spent,
        "" if row["seconds"] is None else duration(row["seconds"]),
    ]


def _with_half(value: float | None, half: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) + ("" if half is None else f" ± {100 * half:.1f}")


def arm_table(found: Mapping[str, Any]) -> Table:
    """The arms: what the baseline's recipe is in all that differs, and how others differ from it.

    A setting in which runs of an arm differ has all their values.
    """
    names = [arm["name"] for arm in found["arms"]]
    base = names.index(found["baseline"])

    def settings(i: int) -> str:
        return ", ".join(
            f"{key} = {' / '.join(map(plain, values[i]))}"
            for key, values in found["differing"].items()
            if i == base or values[i] != values[base]
        )

    return {
        "head": ["arm", "what differs", "seeds", "steps"],
        "body": [
            [
                arm["name"],
                settings(i),
                ", ".join(map(str, arm["seeds"])),
                ", ".join(dict.fromkeys(map(str, arm["steps"]))),
            ]
            for i, arm in enumerate(found["arms"])
        ],
    }


def format_comparison(
    found: Mapping[str, Any], *, width: int, markdown: bool = False
) -> RenderableType:
    """The tables for a terminal of this width, or as Markdown. The figures are whole in any."""
    from rich.box import MARKDOWN
    from rich.cells import cell_len
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable

    figures = tables(found)
    widths = [
        max(
            cell_len(harmless(row[i]))
            for _, rows in figures
            for row in (rows["head"], *rows["body"])
        )
        for i in range(len(figures[0][1]["head"]) if figures else 0)
    ]  # columns of all tables lie below each other
    gap = 1 if sum(widths) + 2 * (len(widths) - 1) > width else 2
    parts: list[RenderableType] = []
    for title, rows, words, least in [
        ("", arm_table(found), 2, []), *((*one, 1, widths) for one in figures)
    ]:  # fmt: skip
        table = RichTable(
            box=MARKDOWN if markdown else None,
            padding=(0, 1) if markdown else (0, gap if least else 2, 0, 0),
            pad_edge=markdown,
            width=sum(widths) + gap * (len(widths) - 1) if least and not markdown else None,
        )
        for i, cell in enumerate(rows["head"]):
            table.add_column(
                escape(harmless(cell)),
                justify="left" if i < words else "right",
                no_wrap=markdown or i >= words,
                min_width=least[i] if i and least else None,
            )
        for row in rows["body"]:
            cells = (harmless(cell) for cell in row)
            table.add_row(*(escape(c.replace("|", r"\|") if markdown else c) for c in cells))
        parts += [escape(harmless(f"{title}:\n" if markdown else title))] if title else []
        parts += [table, ""]
    return Group(*parts, *(escape(harmless(note)) for note in notes(found)))


def write_page(path: Path, arms: Sequence[Arm], found: Mapping[str, Any]) -> None:
    """The comparison as an HTML page that needs nothing else."""
    runs = sum(len(arm.members) for arm in arms)
    names = " · ".join(arm.name for arm in arms)
    values = {
        "name": names if len(names) <= 60 else f"{len(arms)} arms",
        "about": f"{runs} runs in {len(arms)} arms, against {found['baseline']}",
        "arms": arm_table(found),
        "notes": notes(found),
        "figures": tables(found),
        "drawn": _charts(arms),
    }
    write_text(path, render("comparison.html.j2", values))


def _charts(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Section titles to their figures; each has a line an arm."""
    sections = {
        f"pass@1 on {name}": [
            _drawn(
                arms,
                f"{name} against {words}",
                _BAND,
                partial(accuracy, name=name),
                axis,
                bands=True,
                text=percent,
                wide=axis == "tokens",
            )
            for axis, words in _AXES.items()
        ]
        for name in evaluated_sets(arms)
    }
    buckets = {f"pool/bucket_{name}": f"Stored questions: {name}" for name in curves.BUCKETS}
    times = {f"time/{stage}": f"Time: {stage}" for stage in STAGES}
    for title, charts, more in (
        ("Learning", curves.LEARNING, {}),
        ("Experience", curves.EXPERIENCE, buckets),
        ("Training", curves.TRAINING, times),
    ):
        figures = [
            _drawn(
                arms,
                heading if len(lines) == 1 else f"{heading}: {label}",
                note,
                partial(_metric, metric=metric),
                **{key: value for key, value in how.items() if key != "marked"},
            )
            for heading, note, lines, how in charts
            for label, metric in lines.items()
        ]
        figures += [
            _drawn(
                arms,
                heading,
                "seconds" if title == "Training" else "questions",
                partial(_metric, metric=metric),
                bounds=(0.0, None),
                text=seconds if title == "Training" else number,
            )
            for metric, heading in more.items()
        ]
        sections[title] = figures
    return {title: [one for one in made if one] for title, made in sections.items()}


def _metric(member: Member, metric: str | tuple[str, str]) -> list[Point]:
    return series(member.metrics, metric)


def _drawn(
    arms: Sequence[Arm],
    title: str,
    note: str,
    points: Callable[[Member], list[Point]],
    axis: str = "step",
    *,
    bands: bool = False,
    **how: Any,
) -> str:
    drawn = [mean_curve(arm, points, axis) for arm in arms]
    return line_chart(
        title,
        note,
        [(arm.name, line) for arm, (line, _) in zip(arms, drawn, strict=True)],
        bands=[band for _, band in drawn] if bands else (),
        axis=axis,
        **how,
    )


def write_picture(path: Path, arms: Sequence[Arm]) -> None:
    """pass@1 against steps and against generated tokens, a row a set, as PNG (or what the ending
    says).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "--png: needs matplotlib; install it with: pip install 'exgrpo-cli[plots]'"
        ) from None
    sets = evaluated_sets(arms)
    if not sets:
        raise InputError(f"--png {path}: none of the runs has an evaluation to draw")
    figure = Figure(figsize=(10, 3.2 * len(sets)), layout="constrained")
    panels = figure.subplots(len(sets), 2, sharey="row", squeeze=False)
    legend: dict[str, Any] = {}
    for name, row in zip(sets, panels, strict=True):
        for axis, panel in zip(("step", "tokens"), row, strict=True):
            for i, arm in enumerate(arms):  # of one colour in all panels, whatever they lack
                line, band = mean_curve(arm, partial(accuracy, name=name), axis)
                colour, dashes = f"C{i % 10}", ("-", "--", ":")[i // 10 % 3]
                if line:
                    (legend[arm.name],) = panel.plot(
                        *zip(*line, strict=True), dashes, color=colour, marker="."
                    )
                if band:
                    panel.fill_between(
                        *zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0
                    )
            panel.set_xlabel(_AXES[axis])
            places = [float(at) for drawn in panel.lines for at in drawn.get_xdata()]
            ticks = x_ticks(min(places), max(places), axis) if places else []
            panel.set_xticks([at for at, _ in ticks], [label for _, label in ticks])
            panel.locator_params(axis="y", steps=[1, 2, 5, 10])
            panel.yaxis.set_major_formatter(lambda y, _: percent(y))
            panel.grid(alpha=0.3)
        row[0].set_ylabel(f"{name} pass@1", parse_math=False)
    names = [arm.name for arm in arms if arm.name in legend]
    key = figure.legend(
        [legend[name] for name in names],
        [harmless(name) for name in names],
        loc="outside upper center",
        ncols=max(1, min(4, 110 // (8 + max(map(len, names))))),
        frameon=False,
    )
    for label in key.get_texts():
        label.set_parse_math(False)
    kind = path.suffix.lstrip(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise InputError(f"--png {path}: matplotlib knows no format {kind}")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def write_numbers(path: Path, arms: Sequence[Arm]) -> None:
    """A row a run and step with all metrics and what was spent before it: CSV, or ``.parquet``."""
    import polars as pl

    rows = []
    for arm in arms:
        for member in arm.members:
            spent = {f"spent/{cost}": dict(member.spent[cost]) for cost in COSTS}
            for line in member.metrics:
                step = line["step"]
                own = {"arm": arm.name, "run": str(member.run.root), "seed": member.seed}
                costs = {name: sums.get(step) for name, sums in spent.items()}
                rows.append({**own, "step": step, **costs, **line})
    frame = pl.DataFrame(rows, infer_schema_length=None)
    if path.suffix == ".parquet":
        with atomic_path(path) as temporary, temporary.open("wb") as out:
            frame.write_parquet(out)
    else:
        write_text(path, frame.write_csv())
