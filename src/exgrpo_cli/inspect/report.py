"""The HTML report of a run: ``report.html.j2``, filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import interval_of, pass_ks
from exgrpo_cli.inspect.charts import number
from exgrpo_cli.inspect.curves import charts
from exgrpo_cli.inspect.groups import example_groups
from exgrpo_cli.inspect.page import Table, plain, render
from exgrpo_cli.metrics import (
    STAGES,
    Metrics,
    band,
    evaluation_names,
    read_evaluations,
    replay_start,
    series,
)
from exgrpo_cli.progress import duration
from exgrpo_cli.recipe import Recipe, differences, load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.provenance import read_provenance
from exgrpo_cli.tables import write_text


def write_report(run: RunDir) -> Path:
    """Write ``report.html`` from whatever the run has so far; anything may be missing."""
    run.own_recipe()
    metrics = run.read_metrics()
    recipe = _load_recipe(run)
    evaluations, by_source = _evaluations(run, metrics)
    tiles = _tiles(run, metrics)
    values = {
        "name": run.root.resolve().name,
        "about": _about(metrics, recipe),
        "tiles": tiles,
        "columns": [_columns(len(tiles), 6), _columns(len(tiles), 4)],
        "figures": charts(metrics),
        "evaluations": evaluations,
        "by_source": by_source,
        "groups": example_groups(run, recipe or Recipe()),
        "recipe": _changed(recipe),
        "recipe_text": (
            run.recipe.read_text(encoding="utf-8", errors="replace") if run.recipe.exists() else ""
        ),
        "provenance": _provenance(run),
    }
    write_text(run.report, render("report.html.j2", values, "report.js"))
    return run.report


def _columns(count: int, most: int) -> int:
    """Columns for so many tiles, that the last row is as full as can be."""
    rows = -(-count // most)
    return -(-count // rows)


def _tiles(run: RunDir, metrics: Metrics) -> list[tuple[str, str, str]]:
    """The numbers that one looks for first: label, value, detail."""
    done = max(run.steps("policy"), default=0)
    tiles = [("steps", str(done), "" if metrics else "no metrics yet")]
    for name in evaluation_names(metrics)[:2]:
        key = f"eval/{name}/pass@1"
        points = series(metrics, key)
        if points:
            detail = f"{points[0][1]:.1%} at step {points[0][0]:.0f}"
            interval = [(low, high) for s, low, high in band(metrics, key) if s == points[-1][0]]
            if len(points) == 1 and interval:
                detail = f"{interval[0][0]:.1%} to {interval[0][1]:.1%}"
            elif len(points) > 1:
                detail = "from " + detail
            tiles.append((f"{name} pass@1", f"{points[-1][1]:.1%}", detail))
    for label, key, text in (
        ("success rate", "success_rate", lambda v: f"{v:.1%}"),
        ("retired questions", "pool/retired", number),
        ("stored trajectories", "pool/trajectories", number),
    ):
        points = series(metrics, key)
        if points:
            detail = f"from {text(points[0][1])}" if len(points) > 1 else ""
            tiles.append((label, text(points[-1][1]), detail))
    spent = sum(v for stage in STAGES for _, v in series(metrics, f"time/{stage}"))
    if spent:
        tiles.append(("time in stages", duration(spent), ""))
    return tiles


def _about(metrics: Metrics, recipe: Recipe | None) -> str:
    parts = []
    if recipe is not None:
        parts = [
            recipe.model.path or "no model set",
            f"{recipe.curate.questions} questions × {recipe.rollout.samples} samples a step",
            f"replay share {recipe.curate.replay_ratio:g}",
            f"learning rate {recipe.train.learning_rate:g}",
        ]
    if metrics:
        start = replay_start(metrics)
        parts.append("replay has not started" if start is None else f"replay from step {start}")
    return " · ".join(parts)


def _accuracy_cells(row: Mapping[str, Any], ks: Sequence[int]) -> list[str]:
    """pass@1 with its interval, and the plain pass@k."""
    low, high = interval_of(row, 1)
    return [
        f"{row['pass@1']:.1%} [{low:.1%}, {high:.1%}]",
        *(f"{row[f'pass@{k}']:.1%}" if f"pass@{k}" in row else "–" for k in ks if k > 1),
        f"{row['truncated']:.1%}",
        f"{row['tokens']:.0f}",
    ]


def _evaluations(run: RunDir, metrics: Metrics) -> tuple[Table, list[tuple[str, Table]]]:
    """A table of all, and one of the sources of each set's last evaluation."""
    found = read_evaluations(run)
    if not found:
        return _evaluations_from_metrics(metrics), []
    rows = [row for _, summary in found for row in (summary["overall"], *summary["rows"])]
    ks = sorted({k for row in rows for k in pass_ks(row)})
    head = ["pass@1 [95% interval]", *(f"pass@{k}" for k in ks if k > 1)]
    head += ["truncated", "tokens", "problems", "samples"]

    def line(label: str, summary: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
        count = [str(row["problems"]), f"{row['samples'] / row['problems']:.3g}"]
        return [label, f"step {summary['step']}", *_accuracy_cells(row, ks), *count]

    last = {name: summary for name, summary in found if len(summary["rows"]) > 1}
    return {
        "head": ["set", "policy", *head],
        "body": [line(name, summary, summary["overall"]) for name, summary in found],
    }, [
        (
            f"{name} by source, step {summary['step']}",
            {
                "head": ["source", "policy", *head],
                "body": [line(row["source"], summary, row) for row in summary["rows"]],
            },
        )
        for name, summary in last.items()
    ]


def _evaluations_from_metrics(metrics: Metrics) -> Table:
    """What the metrics know, where the evaluations' own files are gone."""
    rows = []
    for name in evaluation_names(metrics):
        key = f"eval/{name}/pass@1"
        bounds = {step: f" [{low:.1%}, {high:.1%}]" for step, low, high in band(metrics, key)}
        for step, value in series(metrics, key):
            rows.append([name, f"step {step:.0f}", f"{value:.1%}{bounds.get(step, '')}"])
    return {"head": ["set", "policy", "pass@1 [95% interval]"], "body": rows}


def _load_recipe(run: RunDir) -> Recipe | None:
    try:
        return load_recipe(run.recipe) if run.recipe.exists() else None
    except InputError:  # of another version; its text is still shown
        return None


def _changed(recipe: Recipe | None) -> Table:
    changed = differences(Recipe(), recipe) if recipe is not None else {}
    return {
        "head": ["changed from the defaults", "here", "default"],
        "body": [[key, plain(new), plain(old)] for key, (old, new) in changed.items()],
    }


def _provenance(run: RunDir) -> Table:
    """A column for each start that differed from the one before it."""
    starts = read_provenance(run)
    names = dict.fromkeys(name for start in starts for name in start)
    return {
        "head": ["", *(f"start {i + 1}" for i in range(len(starts)))],
        "body": [[name, *(plain(start.get(name)) for start in starts)] for name in names],
    }
