"""Where an iteration's time goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from exgrpo_cli import tables
from exgrpo_cli.profiling import compute_seconds, profile_metrics, profile_table


def test_what_counts_as_compute(tmp_path: Path) -> None:
    verdicts = tmp_path / "verdicts.parquet"
    row = {
        "reward": 1.0, "correct": True, "extracted": "1", "status": "ok", "verifier": "math",
    }  # fmt: skip
    rows = [row | {"rollout_id": str(i), "seconds": s} for i, s in enumerate((0.5, 0.0, 2.5))]
    tables.write_table("verdicts", tables.frame("verdicts", rows), verdicts)
    assert compute_seconds("verify", {}, verdicts, 2) == pytest.approx(1.5)
    assert compute_seconds("rollout", {"compute_seconds": 7.0}, verdicts, 2) == 7.0
    trained = {"train/tokens": 600, "train/tokens_per_second": 200.0}
    assert compute_seconds("train", trained, verdicts, 2) == pytest.approx(3.0)
    assert compute_seconds("curate", {"curate/seconds": 1.0}, verdicts, 2) == 0.0


def test_seconds_add_up_to_the_iteration() -> None:
    found = profile_metrics({"rollout": 10.0, "train": 6.0}, {"rollout": 9.0, "train": 5.5}, 17.0)
    assert found["profile/rollout_overhead"] == pytest.approx(1.0)
    assert found["profile/train_overhead"] == pytest.approx(0.5)
    assert found["profile/other_overhead"] == pytest.approx(1.0)
    assert found["profile/compute"] + found["profile/overhead"] == pytest.approx(17.0)


def test_the_table_leaves_the_first_iterations_start_up_out() -> None:
    steps = [(0, 30.0), (1, 11.0), (2, 12.0)]
    lines = [
        {"step": step} | profile_metrics({"rollout": wall}, {"rollout": 10.0}, wall + 0.5)
        for step, wall in steps
    ]
    table = profile_table([*lines, {"step": 3, "eval/heldout/pass@1": 0.5}])
    assert "steps 1 to 2, seconds" in table
    assert "overhead / compute 20.0%" in table
    assert [word for line in table.splitlines() if "start-up" in line for word in line.split()][
        -2:
    ] == ["10.00", "20.50"]
    assert "steps 0 to 0" in profile_table(lines[:1])
    assert profile_table([{"step": 3}]) == "profile: no iteration was run"
