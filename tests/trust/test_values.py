"""The check of a table's values, and what is derived when a table is not as it was left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import replay_candidates
from exgrpo_cli.inspect.report import write_report
from exgrpo_cli.inspect.show import describe as show
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.state import describe
from exgrpo_cli.tables.table import check_frame
from exgrpo_cli.tables.values import check_values, faulty
from making import curate, group, make_recipe, write_problems, write_scores, write_step

PLACE = Path("some/part.parquet")


def rollouts() -> pl.DataFrame:
    rows = group(0, "a", "1100")
    for row in rows:
        row["entropies"] = [0.5] * len(row["token_ids"])
    return tables.frame("rollouts", rows)


def changed(data: pl.DataFrame, row: int, name: str, value: Any) -> pl.DataFrame:
    values = data[name].to_list()
    if isinstance(value, list):
        values[row] = [*value, *values[row][1:]]
    else:
        values[row] = value
    kind = pl.Int64() if isinstance(value, int) else data.schema[name]
    return data.with_columns(pl.Series(name, values, dtype=kind, strict=False))


FAULTS = [
    ("rollout_id", None, "column rollout_id is null in row 3"),
    ("problem_id", None, "column problem_id is null in row 3"),
    ("sample", -1, "column sample is -1 in row 3"),
    ("tokens", 2**31, "column tokens is 2147483648 in row 3"),
    ("role", "old", r"column role is old in row 3 \(known: fresh, replay, import\)"),
    ("finish_reason", "abort", "column finish_reason is abort in row 3"),
    ("mean_entropy", float("nan"), "column mean_entropy is nan in row 3"),
    ("mean_logprob", float("-inf"), "column mean_logprob is -inf in row 3"),
    ("token_ids", [-2], "column token_ids holds -2 in row 3"),
    ("prompt_ids", [None], "column prompt_ids holds null in row 3"),
    ("logprobs", [float("-inf")], "column logprobs holds -inf in row 3"),
    ("logprobs", [float("nan")], "column logprobs holds nan in row 3"),
    ("entropies", [None], "column entropies holds null in row 3"),
]


@pytest.mark.parametrize(("name", "value", "words"), FAULTS)
def test_a_value_that_cannot_be_is_named_with_its_row(name: str, value: Any, words: str) -> None:
    good = rollouts()
    check_values("rollouts", good, PLACE, step=0)
    with pytest.raises(InputError, match=f"^some/part.parquet: {words}") as caught:
        check_values("rollouts", changed(good, 2, name, value), PLACE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value", "words"), FAULTS)
def test_duckdb_finds_the_same_rows(tmp_path: Path, name: str, value: Any, words: str) -> None:
    file = tmp_path / "part.parquet"
    bad = changed(rollouts(), 2, name, value)
    bad.write_parquet(file)
    condition = faulty("rollouts", list(tables.SCHEMAS["rollouts"]))
    query = f"SELECT sample FROM read_parquet('{file}') WHERE {condition}"
    assert duckdb.sql(query).fetchall() == [(bad["sample"][2],)]


def test_what_may_be_null_or_empty_stays_so() -> None:
    data = rollouts().with_columns(pl.lit(None, dtype=pl.List(pl.Float32)).alias("entropies"))
    check_values("rollouts", data, PLACE)
    empty = data.with_columns(
        pl.col("token_ids", "logprobs").list.head(pl.when(pl.int_range(pl.len()) > 1).then(9))
        .list.head(pl.when(pl.int_range(pl.len()) > 1).then(9).otherwise(0))
    )  # fmt: skip
    check_values("rollouts", empty, PLACE)
    with pytest.raises(InputError, match="holds nan in row 4"):
        check_values("rollouts", changed(empty, 3, "logprobs", [float("nan")]), PLACE)
    plan = {"step": 3, "problem_id": "a", "role": "fresh", "samples": 8}
    check_values("plan", tables.frame("plan", [plan, plan | {"role": "replay"}]), PLACE)


def test_a_chat_without_words_is_named() -> None:
    prompts = [[{"role": "user", "content": "1+1="}], [{"role": "user", "content": None}]]
    rows = [
        {"problem_id": str(i), "prompt": p, "answer": "2", "verifier": "math", "source": "s"}
        for i, p in enumerate(prompts)
    ]
    with pytest.raises(InputError, match="column prompt holds null in row 2"):
        check_values("problems", tables.frame("problems", rows), PLACE)


def test_keys_are_there_once_also_over_several_files(tmp_path: Path) -> None:
    data = rollouts()
    with pytest.raises(InputError, match=r"s00000/a/01 is there more than once \(again in row 5\)"):
        check_values("rollouts", pl.concat([data, data[1:2]]), PLACE)
    for i, part in enumerate((data, data[3:])):
        tables.write_table("rollouts", part, tmp_path / tables.part_name(i, 2))
    with pytest.raises(InputError, match="s00000/a/03 is there more than once; are parts of two"):
        tables.read_table("rollouts", tmp_path)


def test_rows_of_another_step_are_named() -> None:
    data = changed(rollouts(), 1, "step", 4)
    with pytest.raises(InputError, match=r"rollout s00000/a/01 is of step 4, not of step 0 \(row"):
        check_values("rollouts", data, PLACE, step=0)
    check_values("rollouts", data, PLACE)


def test_the_writer_is_held_to_the_schema() -> None:
    with pytest.raises(InputError, match="column seed is missing"):
        check_frame("rollouts", rollouts().drop("seed"), PLACE)


# --- curation -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three curated steps, all of them scored."""
    run = RunDir(tmp_path / "run")
    write_problems(run, ["a", "b", "c"])
    for step in range(3):
        rows = group(step, "a", "1100") + group(step, "b", "1000") + group(step, "c", "1110")
        write_step(run, step, rows)
        write_scores(run, step, rows, {r["rollout_id"]: 0.5 + step for r in rows})
        curate(run, step, RECIPE)
    return run


RECIPE = make_recipe(start_success=0.9, store_before_start=True)


def spoil(path: Path, change: pl.Expr) -> None:
    data = pl.read_parquet(path)
    path.unlink()
    data.with_columns(change).write_parquet(path)


@pytest.mark.parametrize("kind", ["rollouts", "scores"])
def test_damage_of_an_older_step_is_found_when_that_step_is_taken_in(
    run: RunDir, kind: str
) -> None:
    file = next(getattr(run, kind)(0).glob("*.parquet"))
    first = pl.int_range(pl.len()) == 0
    spoil(file, pl.when(first).then(float("nan")).otherwise(pl.col("mean_entropy"))
          .cast(pl.Float32).alias("mean_entropy"))  # fmt: skip
    if kind == "rollouts":
        shutil.rmtree(run.scores(0))  # they stand in for it
    with pytest.raises(InputError, match=f"^{file}: column mean_entropy is nan in row 1"):
        curate(run, 2, RECIPE, rebuild=True)


def test_verdicts_without_rollouts_are_refused(run: RunDir) -> None:
    file = next(run.verdicts(1).glob("*.parquet"))
    data = pl.read_parquet(file)
    extra = data[:1].with_columns(pl.lit("s00009/a/00").alias("rollout_id"))
    pl.concat([data, extra]).write_parquet(file)
    with pytest.raises(InputError, match="13 verdicts on 12 rollouts; run: exgrpo verify"):
        curate(run, 2, RECIPE, rebuild=True)


@pytest.mark.parametrize("name", ["experience", "questions"])
@pytest.mark.parametrize("how", ["older", "doubled", "lost column", "gone"])
def test_a_derived_table_that_was_changed_is_derived_anew(
    run: RunDir, tmp_path: Path, name: str, how: str
) -> None:
    path = getattr(run, name)
    want = pl.read_parquet(path)
    if how == "older":
        older = RunDir(tmp_path / "older")
        shutil.copytree(run.root, older.root)
        curate(older, 1, RECIPE, force=True)
        for kind in ("rollouts", "verdicts", "scores"):
            shutil.rmtree(older.root / kind / "step-00002")
        curate(older, 1, RECIPE, rebuild=True)
        path.write_bytes(getattr(older, name).read_bytes())
    elif how == "gone":
        path.unlink()
    else:
        data = want.drop("step" if name == "experience" else "epoch")
        (data if how == "lost column" else pl.concat([want, want])).write_parquet(path)
    assert not path.exists() or not pl.read_parquet(path).equals(want)
    if name == "experience" and how != "gone":
        plan = pl.read_parquet(run.plan(3)).with_columns(pl.lit("replay").alias("role"))
        whole = run.plan(3).read_bytes()
        plan.write_parquet(run.plan(3))
        with pytest.raises(InputError, match=rf"^{path}: not as curation left it; run: exgrpo cur"):
            replay_candidates(run, 3)
        run.plan(3).write_bytes(whole)
    said: list[str] = []
    curate(run, 2, RECIPE, said.append)
    assert pl.read_parquet(path).equals(want)
    told = f"{path}: not as curation left it; the experience is derived anew"
    assert said.count(told) == (how != "gone")
    assert "step 2 is curated already" not in said
    said.clear()
    curate(run, 2, RECIPE, said.append)
    assert said == ["step 2 is curated already"]


# --- metrics and the recipe ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_damaged_metrics_are_named_and_missing_ones_made_anew(run: RunDir, text: str) -> None:
    file = run.stage_metrics(2, "curate")
    whole = json.loads(file.read_text())
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=f"^{file}: damaged; remove it, and curate makes it anew"):
        curate(run, 2, RECIPE)
    file.unlink()
    curate(run, 2, RECIPE)
    anew = json.loads(file.read_text())
    assert {k: v for k, v in anew.items() if k != "curate/seconds"} == {
        k: v for k, v in whole.items() if k != "curate/seconds"
    }


@pytest.mark.parametrize("left", [None, b""])
def test_a_run_without_its_recipe_is_refused_by_all_that_read_it(
    run: RunDir, left: bytes | None
) -> None:
    if left is not None:
        run.recipe.write_bytes(left)
    for read in (describe, write_report, lambda run: show(run.root)):
        with pytest.raises(InputError, match=r"recipe\.toml: missing or empty, though the run has"):
            read(run)
