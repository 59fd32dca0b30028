"""Tables: checked reading, atomic writing, parts and shards."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError


def plan_row(**changes: Any) -> dict[str, Any]:
    return {"step": 3, "problem_id": "a", "role": "fresh", "samples": 8} | changes


def score_row(**changes: Any) -> dict[str, Any]:
    row = {
        "rollout_id": "s00000/a/00", "policy": "p", "step": 0, "logprobs": [-1.0, -2.0],
        "entropies": [0.5, 0.5], "mean_entropy": 0.5, "mean_logprob": -1.5,
    }  # fmt: skip
    return row | changes


def write(path: Path, table: str, *rows: dict[str, Any]) -> Path:
    tables.write_table(table, tables.frame(table, rows), path)
    return path


def test_a_table_reads_back_with_its_types(tmp_path: Path) -> None:
    path = write(tmp_path / "plan.parquet", "plan", plan_row(), plan_row(problem_id="b"))
    back = tables.read_table("plan", path)
    assert back.schema == pl.Schema(tables.polars_schema("plan"))
    assert back["problem_id"].to_list() == ["a", "b"]
    assert back["successes"].to_list() == [None, None]


def test_every_schema_has_a_polars_type_and_a_meaning() -> None:
    for table, columns in tables.SCHEMAS.items():
        assert list(tables.polars_schema(table)) == list(columns)
        for kind, _, meaning in columns.values():
            assert kind
            assert meaning


def test_folders_of_parts_read_in_order(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / tables.part_name(i, 3), "plan", plan_row(problem_id=str(i)))
    assert tables.read_table("plan", tmp_path)["problem_id"].to_list() == ["0", "1", "2"]


def test_brackets_in_a_path_are_no_pattern(tmp_path: Path) -> None:
    path = write(tmp_path / "lr[1e-6]*" / "plan?.parquet", "plan", plan_row())
    assert tables.read_table("plan", path).height == 1
    assert tables.read_table("plan", path.parent).height == 1


def test_other_integer_widths_are_accepted(tmp_path: Path) -> None:
    frame = tables.frame("plan", [plan_row()]).with_columns(pl.col("step").cast(pl.Int64))
    frame.write_parquet(tmp_path / "plan.parquet")
    assert tables.read_table("plan", tmp_path / "plan.parquet").schema["step"] == pl.Int32


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f.drop("role"), ["plan.parquet", "column role is missing", "VARCHAR"]),
        (
            lambda f: f.with_columns(samples=pl.lit("eight")),
            ["plan.parquet", "column samples is String", "INTEGER"],
        ),
        (
            lambda f: f.with_columns(problem_id=pl.Series([None], dtype=pl.String)),
            ["column problem_id is null in row 1"],
        ),
    ],
)
def test_a_mismatch_names_file_column_and_expectation(
    tmp_path: Path, spoil: Any, words: list[str]
) -> None:
    path = tmp_path / "plan.parquet"
    spoil(tables.frame("plan", [plan_row()])).write_parquet(path)
    with pytest.raises(InputError) as caught:
        tables.read_table("plan", path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_of_a_row_are_equally_long(tmp_path: Path) -> None:
    path = tmp_path / "scores.parquet"
    frame = tables.frame("scores", [score_row(), score_row(entropies=[0.5])])
    with pytest.raises(InputError, match="row 2 has logprobs and entropies of different lengths"):
        tables.write_table("scores", frame, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 60])
def test_truncated_parquet_is_one_line(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "plan.parquet", "plan", plan_row())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"plan\.parquet") as caught:
        tables.read_table("plan", path)
    assert "\n" not in str(caught.value)


def test_damage_inside_the_file_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "s.parquet", "scores", *(score_row() for _ in range(1000)))
    data = bytearray(path.read_bytes())
    data[40:80] = bytes(40)
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="not a readable Parquet file"):
        tables.read_table("scores", path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tables.read_table("plan", tmp_path / "none.parquet")
    with pytest.raises(InputError, match=r"no \.parquet file"):
        tables.read_table("plan", tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    tables.write_json(path, {"a": 1})

    def fail() -> None:
        with tables.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("io: Disk quota exceeded (os)"),
    ],
)
def test_a_full_disk_is_said_with_the_file(tmp_path: Path, error: Exception) -> None:
    for write in (tables.atomic_path, tables.atomic_folder):
        with pytest.raises(OSError, match=r"No space|quota") as raised, write(tmp_path / "x"):
            raise error
        assert raised.value.filename == str(tmp_path / "x")
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        tables.write_text(tmp_path / "folder", "a")
    assert raised.value.filename == str(tmp_path / "folder")


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    """SIGKILL at random moments: the target is always one of the whole values."""
    code = (
        "import sys, pathlib, exgrpo_cli.tables as t\n"
        "p = pathlib.Path(sys.argv[1])\n"
        "i = 0\n"
        "while True:\n"
        "    t.write_json(p, {'values': [i] * 20000}); i += 1\n"
    )
    path = tmp_path / "x.json"
    for pause in (0.02, 0.05, 0.09):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)])
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait()
        values = json.loads(path.read_text())["values"]
        assert len(values) == 20000
        assert len(set(values)) == 1


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    tables.write_json(tmp_path / "x.json", 1)
    (tmp_path / "plain").write_text("1")
    assert (tmp_path / "x.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@given(st.integers(0, 200), st.integers(1, 12))
def test_shards_share_the_parts(parts: int, count: int) -> None:
    owners = [[s for s in range(count) if tables.Shard(s, count).has(p)] for p in range(parts)]
    assert all(len(o) == 1 for o in owners)


@given(st.integers(0, 500), st.integers(1, 40))
def test_chunks_cover_everything_once(count: int, size: int) -> None:
    chunks = tables.chunked(count, size)
    assert [i for chunk in chunks for i in chunk] == list(range(count))
    assert len(chunks) >= 1
    assert all(len(chunk) <= size for chunk in chunks)


def test_shard_from_text_and_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ID", "COUNT", "MIN", "MAX"):
        monkeypatch.delenv(f"SLURM_ARRAY_TASK_{name}", raising=False)
    assert tables.parse_shard(None) == tables.WHOLE
    assert tables.parse_shard("2/5") == tables.Shard(2, 5)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    assert tables.parse_shard(None) == tables.Shard(3, 4)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "1")
    assert tables.parse_shard(None) == tables.Shard(2, 4)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "4")
    assert tables.parse_shard(None) == tables.Shard(2, 4)
    assert tables.parse_shard("0/1") == tables.Shard(0, 1)


@pytest.mark.parametrize(
    ("task", "count", "first", "last"),
    [("5", "2", "2", "5"), ("2", "2", "2", "5"), ("x", "2", "0", "1")],
)
def test_slurm_arrays_that_do_not_tell_the_shard(
    monkeypatch: pytest.MonkeyPatch, task: str, count: str, first: str, last: str
) -> None:
    for name, value in zip(("ID", "COUNT", "MIN", "MAX"), (task, count, first, last), strict=True):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    with pytest.raises(InputError, match="give --shard"):
        tables.parse_shard(None)


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/3", "0/0", ""])
def test_bad_shards(text: str) -> None:
    with pytest.raises(InputError, match="I/N"):
        tables.parse_shard(text)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    write(tmp_path / tables.part_name(0, 3), "plan", plan_row())
    write(tmp_path / tables.part_name(2, 3), "plan", plan_row())
    with pytest.raises(InputError, match=r"1 of 3 parts are missing .*part-00001-of-00003"):
        tables.require_all_parts(tmp_path, "rollouts of step 3", "run it")
    write(tmp_path / tables.part_name(1, 3), "plan", plan_row())
    assert len(tables.require_all_parts(tmp_path, "rollouts of step 3", "run it")) == 3
    write(tmp_path / tables.part_name(1, 4), "plan", plan_row())
    with pytest.raises(InputError, match="lie together"):
        tables.require_all_parts(tmp_path, "rollouts of step 3", "run it")


def test_hashes_and_seeds_are_fixed_numbers() -> None:
    """They are written into files, so they may never change."""
    assert tables.token_hash([1, 2, 3]) == "b30a3c159d7e8193559a42a84f1fcae1"
    assert tables.row_seed(0, 7, "a", 1) == 2768904490149569862
    assert tables.token_hash([1, 2, 3]) != tables.token_hash([1, 2, 4])
    assert tables.row_seed(0, 7, "a", 1) == tables.row_seed("0", "7", "a", "1")
    assert tables.row_seed(0, 71, "a") != tables.row_seed(0, 7, "1a")
    assert 0 <= tables.row_seed("x") < 2**62


def test_umask_is_kept() -> None:
    before = os.umask(0o027)
    try:
        assert tables.umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
