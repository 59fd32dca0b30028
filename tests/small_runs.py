"""Runs that are small enough for tests."""

from __future__ import annotations

from pathlib import Path

import polars as pl

SMALL = [
    "--recipe", "recipes/demo.toml",
    "--set", "curate.questions=8",
    "--set", "rollout.samples=4",
    "--set", "rollout.questions_per_part=3",
    "--set", "curate.start_success=0.0",
    "--set", "curate.store_before_start=true",
    "--set", "evaluate.every=0",
    "--set", "verify.workers=1",
]  # fmt: skip


def parts(folder: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(file) for file in sorted(folder.glob("*.parquet"))])
