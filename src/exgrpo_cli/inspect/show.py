"""``exgrpo show``: one screen about a run directory, an evaluation, or a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import format_table
from exgrpo_cli.inspect import status
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal, query
from exgrpo_cli.terminal import harmless

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def describe(path: Path) -> dict[str, Any]:
    """What ``show`` says, as plain data: its ``kind`` is ``run``, ``evaluation`` or ``table``, on
    which the rest depends."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if _is_run(path):
        return status.describe(RunDir(path))
    if (path / "summary.json").is_file():
        return {"kind": "evaluation", "path": str(path)} | _read_summary(path / "summary.json")
    return _describe_table(path)


def show(path: Path, console: Console) -> None:
    """Print one screen about a path; see :func:`describe`."""
    found = describe(path)
    if found["kind"] == "run":
        console.print(status.format_status(found), markup=False, highlight=False, soft_wrap=True)
    elif found["kind"] == "evaluation":
        console.print(format_table(found))
    else:
        _show_table(found, console)


def _is_run(path: Path) -> bool:
    names = ("recipe.toml", "metrics.jsonl", "problems.parquet")
    folders = ("rollouts", "policy", "plan", "metrics")
    return path.is_dir() and (
        any((path / name).is_file() for name in names[:2])
        or ((path / names[2]).is_file() and any((path / name).is_dir() for name in folders))
        or sum((path / name).is_dir() for name in folders) > 1
    )


def _pairs(facts: Mapping[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _read_summary(file: Path) -> dict[str, Any]:
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        format_table(summary)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: not an evaluation's summary") from error
    return dict(summary)


# Queries over `t`: basic numbers of each table. Only the columns that they name are read.
_NUMBERS: dict[str, dict[str, str]] = {
    "problems": {
        "by source": "SELECT source, count(*) AS problems FROM t GROUP BY ALL ORDER BY ALL",
        "by verifier": "SELECT verifier, count(*) AS problems FROM t GROUP BY ALL ORDER BY ALL",
    },
    "plan": {
        "by role": "SELECT step, role, count(*) AS questions, sum(samples)::BIGINT AS rollouts"
        " FROM t GROUP BY ALL ORDER BY step DESC, role LIMIT 12",
    },
    "rollouts": {
        "by role": "SELECT role, count(*) AS rollouts, count(DISTINCT problem_id) AS questions,"
        " avg(tokens) AS tokens, quantile_disc(tokens, 0.95) AS p95,"
        " avg((finish_reason = 'length')::INT) AS cut_off, avg(mean_entropy) AS entropy,"
        " avg(mean_logprob) AS logprob FROM t GROUP BY ALL ORDER BY ALL",
        "by step": "SELECT step, policy, entropy_source, count(*) AS rollouts FROM t GROUP BY ALL"
        " ORDER BY step DESC, policy LIMIT 10",
    },
    "verdicts": {
        "by status and reward": "SELECT status, reward, count(*) AS rollouts, avg(seconds) AS"
        " seconds_mean, max(seconds) AS seconds_max FROM t GROUP BY ALL ORDER BY ALL",
        "by verifier": "SELECT verifier, count(*) AS rollouts, avg(correct::INT) AS correct FROM t"
        " GROUP BY ALL ORDER BY ALL",
    },
    "scores": {
        "by policy": "SELECT policy, step, count(*) AS trajectories, avg(mean_entropy) AS"
        " entropy, avg(mean_logprob) AS logprob FROM t GROUP BY ALL ORDER BY step DESC, policy"
        " LIMIT 10",
    },
    "experience": {
        "all": "SELECT count(*) AS trajectories, count(DISTINCT problem_id) AS questions,"
        " min(step) AS first_step, max(step) AS last_step, avg(tokens) AS tokens,"
        " avg(mean_entropy) AS entropy FROM t",
        "by entropy_source": "SELECT entropy_source, count(*) AS trajectories FROM t GROUP BY ALL"
        " ORDER BY ALL",
    },
    "questions": {
        "by bucket": "SELECT CASE WHEN retired_step IS NOT NULL THEN 'retired'"
        " ELSE coalesce(bucket, 'none yet') END AS bucket, count(*) AS questions,"
        " avg(times_replayed) AS times_replayed, max(last_step) AS last_step FROM t"
        " GROUP BY 1 ORDER BY 1",
        "by successes": "SELECT successes, attempts, count(*) AS questions FROM t"
        " WHERE retired_step IS NULL GROUP BY ALL ORDER BY ALL LIMIT 20",
    },
    "curated": {
        "by bucket": "SELECT step, bucket, count(*) AS questions, avg(step - collected_step) AS"
        " age, avg(mean_entropy) AS entropy, avg(candidates) AS candidates FROM t"
        " GROUP BY ALL ORDER BY step DESC, bucket LIMIT 12",
    },
}

_EXAMPLES: dict[str, str] = {
    "problems": "SELECT problem_id, prompt[-1].content[:400] AS question, answer FROM t"
    " ORDER BY hash(problem_id), problem_id LIMIT 3",
    "rollouts": "SELECT rollout_id, tokens, finish_reason, text[:400] AS text FROM t"
    " ORDER BY hash(rollout_id), rollout_id LIMIT 3",
}


def _describe_table(path: Path) -> dict[str, Any]:
    files = _table_files(path)
    columns = _columns(files[0])
    table, missing = match_table(columns)
    sources = {"f": literal(files)}
    found: dict[str, Any] = {
        "kind": "table",
        "path": str(path),
        "table": None if missing else table,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "rows": query("SELECT count(*) AS n FROM read_parquet($f)", sources, path)[0]["n"],
        "columns": [
            {
                "name": name,
                "type": kind,
                "meaning": tables.SCHEMAS[table][name][2] if name in tables.SCHEMAS[table] else "",
            }
            for name, kind in columns.items()
        ],
    }
    if missing:
        found |= {"nearest": table, "missing": missing, "numbers": {}, "examples": []}
        return found
    view = "WITH t AS (FROM read_parquet($f)) "
    found["numbers"] = {
        name: query(view + sql, sources, path) for name, sql in _NUMBERS[table].items()
    }
    found["examples"] = query(view + _EXAMPLES[table], sources, path) if table in _EXAMPLES else []
    return found


def _table_files(path: Path) -> list[Path]:
    """The table's files: one, a folder's parts, or those of a folder of steps."""
    if path.is_file() and path.suffix != ".parquet":
        raise InputError(f"{path}: show takes a run directory, a .parquet file or a folder of them")
    files = [path] if path.is_file() else sorted(path.rglob("[!.]*.parquet"))
    if not files:
        raise InputError(f"{path}: neither a run directory nor a folder with .parquet files")
    first = _columns(files[0])
    for file in files[1:]:
        if list(_columns(file)) != list(first):
            raise InputError(
                f"{path}: holds different tables ({files[0].name} and {file.relative_to(path)});"
                " show one of them"
            )
    return files


def _columns(file: Path) -> dict[str, str]:
    """Column names to types, in DuckDB's words, from the footer."""
    if file.stat().st_size == 0:
        raise InputError(f"{file}: the file is empty; expected a Parquet table")
    rows = query("DESCRIBE SELECT * FROM read_parquet($f)", {"f": literal([file])}, file)
    return {row["column_name"]: row["column_type"] for row in rows}


def match_table(columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """Which of the tables has these columns.

    Returns:
        Its name and the columns that are missing for it: none for a match, where the table with
        the most columns wins; else the nearest table.
    """

    def missing(table: str) -> list[str]:
        return [name for name in tables.SCHEMAS[table] if name not in columns]

    whole = [table for table in tables.SCHEMAS if not missing(table)]
    if whole:
        return max(whole, key=lambda table: len(tables.SCHEMAS[table])), []
    nearest = max(
        tables.SCHEMAS,
        key=lambda t: (
            len(columns.keys() & tables.SCHEMAS[t].keys())
            / len(columns.keys() | tables.SCHEMAS[t].keys())
        ),
    )
    return nearest, missing(nearest)


def _show_table(found: Mapping[str, Any], console: Console) -> None:
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    console.print(Rule(Text(harmless(found["path"])), align="left"))
    parts = f"{found['files']} files" if found["files"] > 1 else "1 file"
    name = f"table {found['table']}" if found["table"] else "none of a run's tables"
    console.print(f"{name}: {found['rows']:,} rows, {parts}, {_size(found['bytes'])}")
    if not found["table"]:
        console.print(
            f"nearest: {found['nearest']}, but without {', '.join(found['missing'])}", markup=False
        )
    columns = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("column", "type", "meaning"):
        columns.add_column(head, header_style="dim")
    for column in found["columns"]:
        columns.add_row(*(Text(harmless(column[key])) for key in ("name", "type", "meaning")))
    console.print(columns)
    for title, rows in found["numbers"].items():
        if not rows:
            continue
        console.print(Rule(title, align="left"))
        numbers = Table(box=None, padding=(0, 2, 0, 0))
        for head, value in rows[0].items():
            right = isinstance(value, int | float)
            numbers.add_column(
                head.replace("_", " "), header_style="dim", justify="right" if right else "left"
            )
        for row in rows:
            numbers.add_row(*(Text(_cell(value)) for value in row.values()))
        console.print(numbers)
    for row in found["examples"]:
        head, *rest = row.items()
        console.print(Rule(Text(_cell(head[1])), align="left"))
        console.print(_pairs({key: _cell(value) for key, value in rest}))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return harmless(str(value))


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
