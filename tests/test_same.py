"""The comparison of two folders of runs: what it finds, and what it leaves aside."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file, save_file

spec = importlib.util.spec_from_file_location(
    "same", Path(__file__).parents[1] / "benchmarks" / "same.py"
)
assert spec is not None
assert spec.loader is not None
same = importlib.util.module_from_spec(spec)
spec.loader.exec_module(same)


def fill(folder: Path, seconds: float) -> Path:
    """A small run; ``seconds`` stand wherever a run has times."""
    (folder / "policy").mkdir(parents=True)
    pl.DataFrame(
        {
            "rollout_id": ["a", "b", "c"],
            "part": [f"{folder}/part", None, ""],
            "logprobs": [[-0.5, float("nan")], [], [-1.0]],
            "seconds": [seconds, 0.0, seconds],
        }
    ).write_parquet(folder / "verdicts.parquet")
    tensors = {"w": np.array([1.0, -0.0, np.nan], np.float32), "n": np.array([3], np.int64)}
    save_file(tensors, folder / "policy/model.safetensors")
    lines = [{"step": 0, "time/train": seconds}, {"step": 1, "reward/mean": 0.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = {"notes": {"loss": 0.5, "train/seconds": seconds}, "base": f"{folder}/model"}
    (folder / "trainer.json").write_text(json.dumps(state))
    (folder / "curation.json").write_text(json.dumps({"log": {"0": f"{seconds:032}"}, "n": [1]}))
    started = {"first": f"12:00:{seconds}", "last": f"13:00:{seconds}", "commit": f"{seconds}"}
    (folder / "provenance.json").write_text(json.dumps([started | {"seed": 0}]))
    (folder / "recipe.toml").write_text('seed = 0\n[model]\npath = "m"\n')
    (folder / "status.txt").write_text(f"trained 3 steps\nthe last {seconds} s ago\n")
    (folder / "report.html").write_text("<p>ten  questions</p>")
    (folder / ".lock").write_text(str(seconds))
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return fill(tmp_path / "one", 1.5)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return fill(tmp_path / "other", 20.25)


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = same.main(["compare", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def test_times_and_the_folders_own_paths_are_no_difference(
    one: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other / "report.html").write_text("<p>\n  ten questions\n</p>\n")
    code, lines = compare(capsys, one, other)
    assert (code, len(lines)) == (0, 1)
    assert "1 parquet files" in lines[0]
    assert lines[0].endswith("no difference")


def change_table(folder: Path) -> None:
    table = pl.read_parquet(folder / "verdicts.parquet")
    values = pl.Series("logprobs", [[-0.5, None], [], [-1.0]], table["logprobs"].dtype)
    table.with_columns(values).write_parquet(folder / "verdicts.parquet")


def change_type(folder: Path) -> None:
    table = pl.read_parquet(folder / "verdicts.parquet")
    table.with_columns(pl.col("seconds").cast(pl.Float32)).write_parquet(
        folder / "verdicts.parquet"
    )


def turn_rows(folder: Path) -> None:
    table = pl.read_parquet(folder / "verdicts.parquet")
    table[[0, 2, 1]].write_parquet(folder / "verdicts.parquet")


def drop_row(folder: Path) -> None:
    pl.read_parquet(folder / "verdicts.parquet")[:2].write_parquet(folder / "verdicts.parquet")


def turn_columns(folder: Path) -> None:
    table = pl.read_parquet(folder / "verdicts.parquet")
    table.select(reversed(table.columns)).write_parquet(folder / "verdicts.parquet")


def change_bit(folder: Path) -> None:
    tensors = load_file(folder / "policy/model.safetensors")
    tensors["w"][1] = 0.0  # was -0.0, which is equal to it
    save_file(tensors, folder / "policy/model.safetensors")


def change_shape(folder: Path) -> None:
    tensors = load_file(folder / "policy/model.safetensors")
    save_file(tensors | {"w": tensors["w"][None]}, folder / "policy/model.safetensors")


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (change_table, ["verdicts.parquet: logprobs: row 0: [-0.5, nan] | [-0.5, None] (1 of 3"]),
        (change_type, ["verdicts.parquet: seconds: Float64 | Float32"]),
        (turn_columns, ["verdicts.parquet: the columns stand in another order"]),
        (change_bit, ["policy/model.safetensors: w: row 1: -0.0 (bits 0x80000000) | 0.0 (bits 0x"]),
        (change_shape, ["policy/model.safetensors: w: F32 [3] | F32 [1, 3]"]),
        (
            replace("metrics.jsonl", '"reward/mean": 0.25', '"reward/mean": 0.2500000001'),
            ["metrics.jsonl: reward/mean: row 1: 0.25 | 0.2500000001 (1 of 2"],
        ),
        (
            replace("metrics.jsonl", '"time/train": 20.25', '"time/trained": 20.25'),
            ["metrics.jsonl: time/train: only in", "metrics.jsonl: time/trained: only in"],
        ),
        (replace("curation.json", "[1]", "[1, 2]"), ["curation.json: n: row 0: [1] | [1, 2]"]),
        (replace("provenance.json", '"seed": 0', '"seed": 1'), ["provenance.json: 0.seed: row 0"]),
        (replace("trainer.json", "0.5", "1"), ["trainer.json: notes.loss: row 0: 0.5 | 1"]),
        (replace("recipe.toml", '"m"', '"n"'), ["recipe.toml: model.path: row 0: 'm' | 'n'"]),
        (replace("status.txt", "3 steps", "4 steps"), ["status.txt: text: row 0: trained 3 steps"]),
        (replace("report.html", "ten", "nine"), ["report.html: page: row 1: ten questions | nine"]),
        (lambda folder: shutil.rmtree(folder / "policy"), ["policy/model.safetensors: only in"]),
        (
            lambda folder: (folder / "note").write_text("x"),
            ["note: only in"],
        ),
    ],
)
def test_a_difference_is_a_line(
    change: Callable[[Path], None],
    begins: list[str],
    one: Path,
    other: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(other)
    code, lines = compare(capsys, one, other)
    assert code == 1
    assert len(lines) == len(begins) + 1
    for line, begin in zip(lines, begins, strict=False):
        assert line.startswith(begin)
    assert lines[-1].split(": ")[-1].startswith(str(len(begins)))


@pytest.mark.parametrize("change", [turn_rows, drop_row])
def test_rows_are_compared_in_their_order(
    change: Callable[[Path], None], one: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(other)
    code, lines = compare(capsys, one, other)
    assert code == 1
    assert any(line.startswith("verdicts.parquet: rollout_id: row ") for line in lines)


def test_a_difference_that_is_meant_is_left_out(
    one: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_bit(other)
    replace("recipe.toml", "seed = 0", "")(other)
    code, lines = compare(capsys, one, other, "--except", "recipe.toml: seed")
    assert (code, len(lines)) == (1, 2)
    assert lines[-1].endswith("1 difference, 1 excepted")
    code, lines = compare(capsys, one, other, "--except", "recipe.toml", "--except", "policy/*: w")
    assert (code, len(lines)) == (0, 1)
