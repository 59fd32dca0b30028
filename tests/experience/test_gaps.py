"""What curation does where something that it counts on is not there."""

import os
import shutil
import time
from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.step import Step
from exgrpo_cli.tables.duck import open_database, write_query
from exgrpo_cli.tables.files import write_text
from exgrpo_cli.training.batch import Batch
from making import (
    curate,
    group,
    make_recipe,
    plan,
    row,
    write_plan,
    write_problems,
    write_rollouts,
    write_scores,
    write_step,
    write_verdicts,
)

RECIPE = make_recipe()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two stored successes of ``a`` and of ``b``; replay is on from step 1."""
    made = RunDir(tmp_path / "run")
    write_problems(made, [*"abcdef", "zz"])
    write_step(made, 0, group(0, "zz", "1110"))
    curate(made, 0, RECIPE)
    write_step(made, 1, group(1, "a", "1100") + group(1, "b", "1100"))
    curate(made, 1, RECIPE)
    return made


def chosen(run: RunDir, step: int) -> list[str]:
    return tables.read_table("curated", run.curated(step))["rollout_id"].to_list()


def test_a_replay_question_that_was_not_sampled_replays_nothing(run: RunDir) -> None:
    """Its prompt has become too long; its trajectory would be refused by train."""
    rows = group(2, "a", "010", "replay") + group(2, "c", "1000")
    left_out = {"step": 2, "problem_id": "b", "role": "replay", "samples": 3}
    write_plan(run, 2, rows, extra=[left_out])
    write_rollouts(run, 2, rows)
    write_verdicts(run, 2, rows)
    lines: list[str] = []
    curate(run, 2, RECIPE, log=lines.append)
    assert chosen(run, 2) == ["s00001/a/00"]
    said = [line for line in lines if "were not sampled" in line]
    assert len(said) == 1
    assert said[0].startswith("1 planned replay questions were not sampled (the first is b;")
    assert not any("no stored trajectory" in line for line in lines)
    groups = Batch.read(Step.of(run, 2)).groups(RECIPE)  # and so it trains
    assert [len(rows) for rows in groups] == [4, 4]


def test_with_one_sample_a_replay_question_has_no_rollouts(run: RunDir) -> None:
    write_plan(run, 2, group(2, "a", "000", "replay") + group(2, "c", "0"))
    write_rollouts(run, 2, group(2, "c", "0"))
    write_verdicts(run, 2, group(2, "c", "0"))
    curate(run, 2, make_recipe(samples=1))
    assert chosen(run, 2) == ["s00001/a/00"]


def test_a_replay_group_counts_the_success_only_where_there_is_one(run: RunDir) -> None:
    write_step(run, 2, group(2, "a", "010", "replay") + group(2, "c", "010", "replay"))
    lines: list[str] = []
    result = curate(run, 2, RECIPE, log=lines.append)
    assert result["success_rate"] == pytest.approx(3 / 7)
    assert result["success_rate_fresh"] == pytest.approx(2 / 6)
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert (asked["a"]["successes"], asked["a"]["attempts"]) == (2, 4)
    assert (asked["c"]["successes"], asked["c"]["attempts"]) == (1, 3)
    assert any("1 planned replay questions have no stored trajectory" in line for line in lines)
    assert any(line.startswith("step 2: success 0.333") for line in lines)


def test_scored_candidates_come_before_stale_ones(run: RunDir) -> None:
    stored = [row(1, "a", i, True, f"a.s1.{i}") for i in range(2)]
    write_step(run, 2, group(2, "a", "010", "replay"))
    write_scores(run, 2, stored, {"s00001/a/01": 7.0}, prefix="replay")  # stale: 1.0
    lines: list[str] = []
    curate(run, 2, RECIPE, log=lines.append)
    assert chosen(run, 2) == ["s00001/a/01"]
    assert any("1 of 2 replay candidates were not scored" in line for line in lines)
    curate(run, 2, make_recipe(selection="newest"))  # does not look at entropies
    assert chosen(run, 2) == ["s00001/a/00"]
    shutil.rmtree(run.scores(2))
    lines.clear()
    curate(run, 2, RECIPE, log=lines.append, force=True)
    assert chosen(run, 2) == ["s00001/a/00"]  # where none was scored all are alike
    assert not any("were not scored" in line for line in lines)


def test_scores_that_are_gone_are_said(run: RunDir) -> None:
    rows = group(1, "a", "1100") + group(1, "b", "1100")
    write_scores(run, 1, rows, {r["rollout_id"]: 0.5 for r in rows})
    curate(run, 1, RECIPE)
    write_step(run, 2, group(2, "a", "010", "replay"))
    lines: list[str] = []
    curate(run, 2, RECIPE, log=lines.append)
    assert not any("pi_past" in line for line in lines)
    write_scores(run, 2, rows, {"s00001/a/00": 0.1, "s00001/a/01": 0.2}, prefix="replay")
    shutil.rmtree(run.scores(1))
    curate(run, 2, RECIPE, log=lines.append)
    made = tables.read_table("curated", run.curated(2))
    assert made["logprob_source"].to_list() == ["engine"]
    assert any(
        line.startswith("1 replayed trajectories have no scores") and "(steps 1)" in line
        for line in lines
    )


def test_a_question_replayed_while_the_epoch_ends_keeps_its_turn(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_problems(run, ["a", "b", "c", "d"])
    recipe = make_recipe(questions=2, start_success=0.0, store_before_start=True)
    write_step(run, 0, group(0, "a", "1100") + group(0, "b", "0000"))
    curate(run, 0, recipe)
    write_step(run, 1, group(1, "c", "0000") + group(1, "a", "000", "replay"))
    curate(run, 1, recipe)
    # d ends the epoch's first round; then b, c and d have their second turns while a is replayed.
    for step, problem in enumerate("dbcd", start=2):
        write_step(run, step, group(step, problem, "0000") + group(step, "a", "000", "replay"))
        curate(run, step, recipe)
    write_step(run, 6, group(6, "b", "0000") + group(6, "a", "000", "replay"))
    curate(run, 6, make_recipe(questions=2, replay_ratio=0.01, start_success=0.0))
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert [asked[q]["epoch"] for q in "abcd"] == [0, 2, 1, 1]
    assert plan(run, 7)["fresh"][0] == "a"  # its turn in epoch 1, which the others have had
    made = plan(run, 7)["fresh"]
    write_step(run, 7, [r for q in made for r in group(7, q, "0000")])
    curate(run, 7, make_recipe(questions=2, replay_ratio=0.01, start_success=0.0))
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert asked["a"]["epoch"] == 1


def test_metrics_of_format(run: RunDir) -> None:
    write_step(run, 2, group(2, "c", "1000"))
    path = run.verdicts(2) / tables.part_name(0, 1)
    verdicts = tables.read_table("verdicts", path)
    status = pl.when(pl.col("correct")).then(pl.lit("ok")).otherwise(pl.lit("no_format"))
    tables.write_table("verdicts", verdicts.with_columns(status=status), path)
    found = curate(run, 2, RECIPE)
    assert (found["rollout/no_format_share"], found["rollout/no_answer_share"]) == (0.75, 0.0)


def test_no_temporary_file_of_duckdb(tmp_path: Path) -> None:
    """Its own, beside ours, would stay after a kill; those of earlier versions are swept."""
    path = tmp_path / "a [table].parquet"
    old, new = (tmp_path / f"tmp_.a [table].parquet.{name}.tmp" for name in ("old", "new"))
    for left in (old, new):
        left.write_bytes(b"half a table")
    os.utime(old, (time.time() - 7200,) * 2)
    seen: list[list[str]] = []
    with open_database() as con:

        def look(n: int) -> int:
            seen.append(sorted(p.name for p in tmp_path.iterdir()))
            return n

        con.create_function("look", look, ["BIGINT"], "BIGINT", side_effects=True)  # type: ignore[list-item,arg-type]
        write_query(con, "SELECT look(i) AS i FROM range(3) AS t(i)", path)
    assert {name for names in seen for name in names if name.startswith("tmp_")} == {
        old.name,
        new.name,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, new.name])
    write_text(tmp_path / "other", "")  # sweeps its own alone
    assert new.exists()
