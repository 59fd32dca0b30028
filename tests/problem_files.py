"""Problem sets as files, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from exgrpo_cli.problems import import_problems


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    pl.DataFrame(rows).write_parquet(path)
    return path


WRITERS: dict[str, Callable[[Path, list[Any]], Path]] = {
    "jsonl": write_jsonl,
    "json": write_json,
    "parquet": write_parquet,
}


def one(path: Path, **options: Any) -> dict[str, Any]:
    """The only problem of a file, and the report."""
    imported = import_problems(path, workers=1, **options)
    assert imported.frame.height == 1
    return imported.frame.row(0, named=True) | {"report": imported.report}
