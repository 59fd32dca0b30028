"""Trajectories of others go through a run: imported, judged, scored, stored, replayed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from exgrpo_cli.experience.explain import explain
from exgrpo_cli.inspect.groups import example_groups
from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.discard import discard_after
from exgrpo_cli.step import Step
from exgrpo_cli.training.batch import Batch
from making import (
    curate,
    group,
    import_row,
    make_recipe,
    parts,
    plan,
    pool,
    questions,
    rebuild,
    settings,
    small_run,
    teacher,
    write_imports,
    write_problems,
    write_step,
)

Exgrpo = Callable[..., Any]
TEACHER = {  # the pool is the teacher's alone, failures too, and these come first
    "curate.replayed": 2, "curate.store": "origin <> 'own'", "curate.choose": "reward",
}  # fmt: skip
# It ends, as by a kill, when two files are written.
KILLED = """
import os
from exgrpo_cli import tables
from exgrpo_cli.stages import imports
imports._ROWS = 16
write, left = tables.write_table, [2]
def stopping(*given):
    left[0] -= 1
    write(*given) if left[0] >= 0 else os._exit(137)
tables.write_table = stopping
"""


def tables_of(run: RunDir) -> list[pl.DataFrame]:
    return [pl.read_parquet(getattr(run, kind)) for kind in ("experience", "questions")]


def begun(exgrpo: Exgrpo, run: RunDir, policy: Path) -> Path:
    """A run with the teacher's trajectories, before its step 0."""
    rules = [f"{key}={json.dumps(value)}" for key, value in TEACHER.items()]
    exgrpo("init", run.root, *small_run(policy), *settings(*rules))
    return teacher(policy)


@pytest.fixture(scope="module")
def looped(exgrpo: Exgrpo, guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("looped") / "run")
    file = begun(exgrpo, run, guesser)
    done = exgrpo("import", run.root, file, "--json")
    found = json.loads(done.stdout)
    counts = ("step", "source", "trajectories", "questions", "other_problems", "there_already")
    assert [found[key] for key in counts] == [0, "teacher", 60, 20, 1, 0]
    exgrpo("run", run.root, "--steps", 2)
    return run


def test_they_are_judged_scored_stored_and_replayed(looped: RunDir) -> None:
    rows = parts(looped.imported("rollouts", 0))
    assert rows["rollout_id"].n_unique() == 60
    assert set(rows["token_ids"].list.last()) == {parts(looped.rollouts(0))["token_ids"][0][-1]}
    assert set(parts(looped.rollouts(0))["role"]) == {"fresh"}
    verdicts = parts(looped.imported("verdicts", 0))
    assert verdicts["correct"].sum() == 40
    scores = parts(looped.imported("scores", 0))
    assert set(scores["policy"]) == {"step-00000"}
    held = pl.read_parquet(looped.experience)
    assert held["rollout_id"].str.starts_with("i/teacher/").sum() > 0
    chosen = pl.read_parquet(looped.curated(1))
    assert chosen.height == 2 * 4
    assert chosen["rollout_id"].str.starts_with("i/teacher/").all()
    assert set(chosen["reward"]) == {0.0, 1.0}  # the failure first, and then a success
    assert set(chosen["collected_step"]) == {0}
    past = chosen.join(scores, on="rollout_id", suffix="_scored")
    assert past["logprobs"].to_list() == past["logprobs_scored"].to_list()
    assert set(past["logprob_source"]) == {"score"}
    asked = questions(looped)
    only = [q for q in asked.values() if q["attempts"] == 0]
    assert only
    assert {(q["bucket"], q["successes"], q["times_replayed"]) for q in only} == {("hard", 0, 0)}
    groups = Batch.read(Step.of(looped, 1)).groups(load_recipe(looped.recipe))
    replayed = [[row.replayed for row in rows] for rows in groups if rows[0].replayed]
    assert replayed == [[True, True, False, False]] * 4
    assert looped.read_metrics()[1]["train/replayed_rows"] == 8
    shown = example_groups(looped, load_recipe(looped.recipe))
    again = [[row["verdict"] for row in g["rows"][:2]] for g in shown if g["role"] == "replay"]
    assert again[0] == ["replayed, wrong", "replayed"]


def test_by_hand_in_shards_and_after_a_kill_it_is_the_same(
    exgrpo: Exgrpo, guesser: Path, looped: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    file = begun(exgrpo, run, guesser)
    exgrpo("import", run.root, file, before=KILLED, code=137)
    assert len(run.imports(0)) == 2
    said = exgrpo("status", run.root).stdout
    exgrpo("import", run.root, file)
    names = run.imports(0)
    assert len(names) == 3
    again = json.loads(exgrpo("import", run.root, file, "--source", "x", "--json").stdout)
    assert (again["done"], again["there_already"], run.imports(0)) == (0, 60, names)
    for step in (0, 1):
        exgrpo("rollout", run.root)
        if step == 0:
            for stage in ("verify", "score"):
                exgrpo(stage, run.root, "--shard", "0/2")
                said = exgrpo("status", run.root).stdout
                assert "imports 2/3 parts, missing 1" in said
                assert f"next: exgrpo {stage} {run.root} --step 0" in said
                exgrpo(stage, run.root, "--shard", "1/2")
        for stage in ("verify", "score", "curate", "train"):
            exgrpo(stage, run.root)
    order = ["rollout_id", "step"]
    for kind in ("rollouts", "scores"):
        one, other = (parts(r.imported(kind, 0)).sort(order) for r in (run, looped))
        assert_frame_equal(one, other)
    for one, other in zip(tables_of(run), tables_of(looped), strict=True):
        assert_frame_equal(one.drop("part", strict=False), other.drop("part", strict=False))
    assert_frame_equal(*(pl.read_parquet(r.curated(1)) for r in (run, looped)))
    before = tables_of(run)
    exgrpo("curate", run.root, "--rebuild", "--force")
    for one, other in zip(tables_of(run), before, strict=True):
        assert_frame_equal(one, other)


def test_in_the_middle_of_a_step_the_next_one_takes_them_in(
    exgrpo: Exgrpo, guesser: Path, looped: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(looped.root, tmp_path / "run"))
    problem = json.loads((guesser.parent / "problems.jsonl").read_text().splitlines()[30])
    file = tmp_path / "mine.jsonl"
    text = f"<answer>\\boxed{{{problem['answer']}}}</answer>"
    file.write_text(json.dumps({"problem_id": problem["id"], "by": "me", "output": text}))
    exgrpo("rollout", run.root, "--step", 2)
    exgrpo("import", run.root, file, "--columns", "source=by", "--set", "rollout.max_new_tokens=72",
           code=2)  # fmt: skip
    text = f"f\\boxed{{{problem['answer']}}}"
    file.write_text(json.dumps({"problem_id": problem["id"], "by": "me", "output": text}))
    done = exgrpo("import", run.root, file, "--columns", "source=by", "--json")
    assert json.loads(done.stdout)["step"] == 3
    assert not run.imports(2)
    done = exgrpo("run", run.root, "--steps", 4)
    assert "of 1 imported trajectories 1 are right, and 1 are in the pool now" in done.stderr
    held = pool(run)[problem["id"]]
    assert any(rollout.startswith(f"i/me/{problem['id']}/") for rollout in held)
    told = exgrpo("verify", run.root, "--step", 3, "--explain", held[-1])
    assert "correct: yes" in told.stdout
    assert pl.read_parquet(run.imported("scores", 3) / run.imports(3)[0].name)["policy"][0] == (
        "step-00003"
    )
    (run.root / "merged" / "step-old").mkdir(parents=True)  # somebody's own
    discard_after(run, 0)  # what was imported stays, and is scored by the policy of then
    assert (run.root / "merged" / "step-old").is_dir()
    assert run.imports(3)
    assert run.imported("verdicts", 3).is_dir()
    assert not run.imported("scores", 3).exists()
    assert run.imported("scores", 0).is_dir()


def test_a_file_of_nothing_for_the_run_is_one_line(
    exgrpo: Exgrpo, looped: RunDir, tmp_path: Path
) -> None:
    file = tmp_path / "other.jsonl"
    problem_id = pl.read_parquet(looped.problems)["problem_id"][0]
    file.write_text('{"prompt": "What?", "response": "That."}\n')
    done = exgrpo("import", looped.root, file, code=2)
    assert done.stderr.strip() == (
        f"exgrpo: {file}: nothing to take in of 1 rows of problems that are not the run's (by"
        " question or id)"
    )
    file.write_text(json.dumps({"problem_id": problem_id, "response": "x", "by": "own"}) + "\n")
    done = exgrpo("import", looped.root, file, "--columns", "source=by", code=2)
    assert done.stderr == (
        f"exgrpo: {file}, line 1: source 'own': no name for trajectories of others\n"
    )
    done = exgrpo("import", looped.root, file, "--source", "own", code=2)
    assert done.stderr.endswith("no name for trajectories of others; give another by --source\n")
    file.write_text('{"problem_id": "nosuch", "response": null}\n')
    done = exgrpo("import", looped.root, file, code=2)
    assert done.stderr.endswith(" or id), 1 rows without a response\n")
    done = exgrpo("import", looped.root, file, "--set", "curate.replay_ratio=0", code=2)
    assert "nothing is ever replayed" in done.stderr


def test_rules_see_where_a_trajectory_is_from(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_problems(run, [*"abcd", "zz"])
    recipe = make_recipe(questions=2, choose="CASE WHEN origin = 'r1' THEN 0 ELSE 1 END")
    write_step(run, 0, group(0, "zz", "1110"))
    write_imports(run, 0, [import_row(0, q, i, i > 0, f"{q}{i}") for q in "ad" for i in range(2)])
    curate(run, 0, recipe)
    assert plan(run, 1)["replay"][0] in "ad"
    assert pool(run) == {"a": ["i/r1/a/0.1"], "d": ["i/r1/d/0.1"]}  # replay was not on yet
    write_step(run, 1, group(1, "a", "1100") + group(1, "d", "1111"))
    write_imports(run, 1, [import_row(1, q, 0, True, f"more of {q}") for q in "ad"])
    curate(run, 1, recipe)
    assert set(pool(run)) == {"a"}  # d is mastered, whoever else has solved it
    found = explain(run, make_recipe(store="correct AND advantage >= 0.5"), 1, "a")
    rows = {row["row"]: (row["advantage"], row["value"]) for row in found["rules"]["store"]["rows"]}
    assert rows["i/r1/a/1.0"] == (0.5, True)  # 1 - 2 of 4
    assert rows["s00001/a/02"] == (-0.5, False)
    found = explain(run, make_recipe(store="correct AND stored < 1"), 0, "a")
    rows = {row["row"]: (row["stored"], row["value"]) for row in found["rules"]["store"]["rows"]}
    assert rows == {"i/r1/a/0.0": (0, False), "i/r1/a/0.1": (0, True)}  # before they were stored
    write_step(run, 2, group(2, "a", "000", "replay"))
    curate(run, 2, recipe)
    (chosen,) = pl.read_parquet(run.curated(2)).to_dicts()
    assert (chosen["rollout_id"], chosen["logprob_source"]) == ("i/r1/a/0.1", "engine")
    assert set(chosen["logprobs"]) == {0.0}  # nothing was scored: pi_past is 1
    before = tables_of(run)
    rebuild(run, 2, recipe)
    for one, other in zip(tables_of(run), before, strict=True):
        assert_frame_equal(one, other)
