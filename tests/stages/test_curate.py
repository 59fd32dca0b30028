"""Curation: the rules one by one, the public implementation's scripts, and bad input."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import fetch_trajectories, replay_candidates
from exgrpo_cli.experience.pool import replay_on
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    experience,
    group,
    make_recipe,
    plan,
    pool,
    prepare_choice,
    questions,
    rebuild,
    row,
    start_replay,
    vectors,
    write_plan,
    write_problems,
    write_rollouts,
    write_scores,
    write_step,
    write_verdicts,
)

# --- retiring and collecting: the scripts of the public implementation --------------------------


def script_rows(step: int, script_group: dict) -> list[dict]:
    """A group of the scripts as files hold it: without the replayed row, which is sample 0."""
    rows = [
        row(
            step,
            script_group["question"],
            i,
            bool(reward),
            text,
            script_group["role"],
            logprob,
        )
        for i, (reward, text, logprob) in enumerate(
            zip(
                script_group["rewards"],
                script_group["texts"],
                script_group["logprobs"],
                strict=True,
            )
        )
    ]
    return rows[1:] if script_group["role"] == "replay" else rows


@pytest.mark.parametrize(
    "name", ["life_of_questions", "delayed_start", "same_question_twice_in_a_batch"]
)
def test_scripts_of_the_public_implementation(run: RunDir, name: str) -> None:
    script = next(s for s in vectors("retire_and_collect")["scripts"] if s["name"] == name)
    recipe = make_recipe(samples=8, questions=2)
    rates: list[float] = []
    if script["initially_replaying"]:
        write_step(run, 0, group(0, "zz", "11110000"))
        curate(run, 0, recipe)
    for step, state in enumerate(script["steps"], 1):
        rows = [r for g in state["groups"] for r in script_rows(step, g)]
        write_step(run, step, rows, parts=2)
        result = curate(run, step, recipe)
        rates.append(result["success_rate"])
        assert result["success_rate"] == pytest.approx(state["solved_ratio"], rel=1e-9)
        assert result["replay/started"] == int(state["replay_on_during_step"])

        stored: dict[str, set[tuple[str, float]]] = {}
        held = experience(run)
        lists = fetch_trajectories(run.root, held)
        for entry, ids in zip(held.to_dicts(), lists["token_ids"].to_list(), strict=True):
            text = "".join(chr(i) for i in ids[:-1])
            logprob = round(entry["mean_logprob"], 4)
            stored.setdefault(entry["problem_id"], set()).add((text, logprob))
        assert stored == {
            question: {(t["text"], t["logprob"]) for t in trajectories}
            for question, trajectories in state["pool"].items()
        }
        assert Counter(held["problem_id"].to_list()) == state["trajectories"]
        asked = {q: v for q, v in questions(run).items() if q != "zz"}
        bucket_of = {q: v["successes"] for q, v in asked.items() if v["bucket"] is not None}
        assert bucket_of == state["bucket_of"]
        retired = sorted(q for q, v in asked.items() if v["retired_step"] is not None)
        assert retired == state["retired"]
    recorded = json.loads(run.curation.read_text())["replay_from"]
    assert recorded == (1 if script["initially_replaying"] else 4)
    before = experience(run)
    rebuild(run, len(script["steps"]), recipe)
    assert experience(run).equals(before)


# --- the rules, one by one ----------------------------------------------------------------------


def test_a_question_s_life(run: RunDir) -> None:
    recipe = make_recipe()
    start_replay(run, recipe)
    assert pool(run) == {}  # the step that starts replay stores nothing
    assert questions(run)["zz"]["bucket"] is None

    write_step(run, 1, group(1, "a", "1000") + group(1, "b", "1110") + group(1, "c", "1111"))
    result = curate(run, 1, recipe)
    assert pool(run) == {
        "a": ["s00001/a/00"],
        "b": ["s00001/b/00", "s00001/b/01", "s00001/b/02"],
    }
    asked = questions(run)
    assert [asked[q]["bucket"] for q in "abc"] == ["hard", "easy", None]
    assert asked["c"]["retired_step"] == 1
    assert asked["c"]["successes"] is None
    assert result["pool/retired"] == 1
    assert (result["solve/none"], result["solve/all"]) == (0.0, pytest.approx(1 / 3))

    # No success moves nothing; a replay group counts its replayed row.
    write_step(run, 2, group(2, "b", "0000") + group(2, "a", "010", "replay"))
    curate(run, 2, recipe)
    asked = questions(run)
    assert (asked["b"]["successes"], asked["b"]["attempts"], asked["b"]["last_step"]) == (3, 4, 2)
    assert (asked["a"]["successes"], asked["a"]["attempts"]) == (2, 4)
    assert (asked["a"]["fresh_successes"], asked["a"]["fresh_attempts"]) == (1, 3)
    assert (asked["a"]["bucket"], asked["a"]["times_replayed"]) == ("medium", 1)
    assert pool(run)["a"] == ["s00001/a/00", "s00002/a/02r"]

    # All fresh samples of a replay group succeed: retired, and its trajectories leave at once.
    write_step(run, 3, group(3, "a", "111", "replay"))
    curate(run, 3, recipe)
    assert set(pool(run)) == {"b"}
    assert questions(run)["a"]["retired_step"] == 3


@pytest.mark.parametrize(
    ("settings_", "stored", "bucket"),
    [
        ({}, {"a", "b", "c"}, {"a": "hard", "b": "medium", "c": "easy"}),
        ({"lower": 1}, {"b", "c"}, {"a": "hard", "b": "medium", "c": "easy"}),
        ({"upper": 2}, {"a", "b"}, {"a": "hard", "b": "medium", "c": "easy"}),
    ],
)
def test_bounds(run: RunDir, settings_: dict, stored: set, bucket: dict) -> None:
    recipe = make_recipe(**settings_)
    start_replay(run, recipe)
    write_step(run, 1, group(1, "a", "1000") + group(1, "b", "0110") + group(1, "c", "1101"))
    curate(run, 1, recipe)
    assert set(pool(run)) == stored
    assert {q: questions(run)[q]["bucket"] for q in "abc"} == bucket


def test_fewer_samples_leave_what_more_have_stored(run: RunDir) -> None:
    start_replay(run, make_recipe(samples=4))
    write_step(run, 1, group(1, "a", "1101") + group(1, "b", "0110"))
    curate(run, 1, make_recipe(samples=4))
    before = pool(run)
    assert set(before) == {"a", "b"}
    rebuild(run, 1, make_recipe(samples=2))
    assert pool(run) == before


def test_a_step_of_errors_alone_is_no_failure_of_the_policy(run: RunDir) -> None:
    rows = group(0, "a", "0000")
    write_step(run, 0, rows)
    path = run.verdicts(0) / tables.part_name(0, 1)
    verdicts = tables.read_table("verdicts", path)
    tables.write_table("verdicts", verdicts.with_columns(status=pl.lit("error")), path)
    with pytest.raises(InputError, match=r"every verdict is an error.*--step 0 --force"):
        curate(run, 0, make_recipe())
    assert not run.plan(1).exists()
    one = pl.when(pl.col("rollout_id") == rows[0]["rollout_id"]).then(pl.lit("ok"))
    one = one.otherwise(pl.lit("error")).alias("status")
    tables.write_table("verdicts", verdicts.with_columns(one), path)
    curate(run, 0, make_recipe())


def test_count_replayed_says_which_counts_make_the_bucket(run: RunDir) -> None:
    write_step(run, 0, group(0, "zz", "1110"))
    write_step(run, 1, group(1, "a", "1100"))
    write_step(run, 2, group(2, "a", "000", "replay"))
    rebuild(run, 2, make_recipe())
    assert (questions(run)["a"]["successes"], questions(run)["a"]["bucket"]) == (1, "hard")
    rebuild(run, 2, make_recipe(count_replayed=False))  # 0 of 3: nothing moves
    assert (questions(run)["a"]["successes"], questions(run)["a"]["bucket"]) == (2, "medium")


def test_delayed_start_is_strict_and_latched(run: RunDir) -> None:
    recipe = make_recipe(start_success=0.5, questions=2)
    for step, (pattern, started) in enumerate([("1100", 0), ("1110", 0), ("1000", 1), ("0000", 1)]):
        write_step(run, step, group(step, "a", pattern))
        result = curate(run, step, recipe)
        assert result["replay/started"] == started
        assert replay_on(run, step) is bool(started)
        assert result["plan/replay"] == (1 if step >= 2 else 0)
    # Exactly at the bound is not above it; the step that passes it stores nothing.
    assert pool(run) == {"a": ["s00002/a/00"]}


def test_store_before_start_keeps_what_came_before(run: RunDir) -> None:
    recipe = make_recipe(start_success=0.5, store_before_start=True)
    write_step(run, 0, group(0, "a", "1000"))
    assert curate(run, 0, recipe)["plan/replay"] == 0
    assert pool(run) == {"a": ["s00000/a/00"]}
    write_step(run, 1, group(1, "b", "1110"))
    assert curate(run, 1, recipe)["plan/replay"] == 2
    assert set(pool(run)) == {"a", "b"}


def test_equal_tokens_enter_once_with_their_first_log_probabilities(run: RunDir) -> None:
    recipe = make_recipe()
    start_replay(run, recipe)
    rows = [row(1, "a", i, i < 3, "same", logprob=-1.0 - i) for i in range(4)]
    write_step(run, 1, [*rows, row(1, "b", 0, True, "same"), row(1, "b", 1, False, "no")], parts=3)
    curate(run, 1, recipe)
    assert pool(run) == {"a": ["s00001/a/00"], "b": ["s00001/b/00"]}
    write_step(run, 2, [row(2, "a", i, i == 3, "same", logprob=-9.0) for i in range(4)])
    curate(run, 2, recipe)
    held = experience(run).filter(pl.col("problem_id") == "a").to_dicts()
    assert [(h["rollout_id"], h["mean_logprob"]) for h in held] == [("s00001/a/00", -1.0)]
    assert questions(run)["a"]["successes"] == 1  # the bucket moves all the same


def test_without_replay_it_is_plain_grpo(run: RunDir) -> None:
    """Nothing is stored, nothing retires, replay never starts: every question once an epoch."""
    write_problems(run, ["a", "b"])
    recipe = make_recipe(start_success=0.0, questions=2, replay_ratio=0.0, store_before_start=True)
    for step in range(3):
        write_step(run, step, group(step, "a", "1111") + group(step, "b", "1000"))
        assert sorted(plan_after(run, step, recipe)) == ["a", "b"]
        assert not replay_on(run, step)  # so fresh tokens stay clipped
    assert experience(run).is_empty()
    assert questions(run)["a"]["retired_step"] is None
    planned = tables.read_table("plan", run.plan(3))
    assert set(planned.select("role", "samples").rows()) == {("fresh", 4)}
    switched = make_recipe(start_success=0.0, questions=2)  # the log is the truth, also for this
    write_step(run, 3, group(3, "a", "1111") + group(3, "b", "1000"))
    assert curate(run, 3, switched)["rebuilt"]
    assert questions(run)["a"]["retired_step"] == 0
    assert set(pool(run)) == {"b"}


def test_retired_questions_come_back_for_a_check_up(run: RunDir) -> None:
    write_problems(run, ["a", "b"])
    # of 2 questions a hundredth: replay is on, and replays none
    recipe = make_recipe(start_success=0.0, questions=2, replay_ratio=0.01, revive_after=3)
    write_step(run, 0, group(0, "a", "1111") + group(0, "b", "1000"))
    assert plan_after(run, 0, recipe) == ["b"]
    write_step(run, 1, group(1, "b", "1000") + group(1, "a", "1100"))  # retired: leaves nothing
    assert plan_after(run, 1, recipe) == ["b"]
    assert set(pool(run)) == {"b"}
    assert questions(run)["a"]["retired_step"] == 0
    write_step(run, 2, group(2, "b", "1000"))
    assert plan_after(run, 2, recipe) == ["a", "b"]  # due again in step 3
    write_step(run, 3, group(3, "b", "1000") + group(3, "a", "1110"))
    curate(run, 3, recipe)
    assert questions(run)["a"]["retired_step"] is None
    assert questions(run)["a"]["bucket"] == "easy"
    write_step(run, 4, group(4, "b", "1000") + group(4, "a", "1111"))
    assert curate(run, 4, recipe)["pool/retired"] == 1
    assert questions(run)["a"]["retired_step"] == 4

    rebuild(run, 4, make_recipe(start_success=0.0, questions=2))  # without the option
    assert questions(run)["a"]["retired_step"] == 0
    assert set(pool(run)) == {"b"}


def plan_after(run: RunDir, step: int, recipe: Recipe) -> list[str]:
    curate(run, step, recipe)
    return sorted(plan(run, step + 1)["fresh"])


def test_nothing_is_left_when_every_question_is_retired(run: RunDir) -> None:
    write_problems(run, ["a", "b"])
    recipe = make_recipe(start_success=0.0)
    lines: list[str] = []
    write_step(run, 0, group(0, "a", "1111") + group(0, "b", "1111"))
    result = curate(run, 0, recipe, log=lines.append)
    assert result["finished"] is True
    assert tables.read_table("plan", run.plan(1)).height == 0
    assert any("every question is retired" in line for line in lines)
    assert curate(run, 0, recipe)["finished"] is True  # also when it was done before


# --- bad input ----------------------------------------------------------------------------------


def test_missing_pieces_are_named_with_their_mend(run: RunDir) -> None:
    recipe = make_recipe()
    with pytest.raises(InputError, match=r"no plan for step 0; run: exgrpo rollout"):
        curate(run, 0, recipe)
    rows = group(0, "a", "1100") + group(0, "b", "1100")
    write_plan(run, 0, rows)
    with pytest.raises(InputError, match=r"no rollouts of step 0 yet; run: exgrpo rollout"):
        curate(run, 0, recipe)
    write_rollouts(run, 0, rows, parts=2)
    with pytest.raises(InputError, match=r"no verdicts of step 0 yet; run: exgrpo verify"):
        curate(run, 0, recipe)
    write_verdicts(run, 0, rows[:5])
    with pytest.raises(
        InputError, match=r"3 of 8 rollouts of step 0 have no verdict \(the first is s00000/b/01\)"
    ):
        curate(run, 0, recipe)
    write_verdicts(run, 0, rows)
    (run.rollouts(0) / tables.part_name(1, 2)).unlink()
    with pytest.raises(InputError, match=r"1 of 2 parts are missing"):
        curate(run, 0, recipe)
    write_rollouts(run, 0, rows, parts=2)
    write_scores(run, 0, rows, {r["rollout_id"]: 0.5 for r in rows}, parts=3)
    (run.scores(0) / tables.part_name(2, 3)).unlink()
    with pytest.raises(InputError, match=r"1 of 3 parts are missing .* exgrpo score"):
        curate(run, 0, recipe)
    shutil.rmtree(run.scores(0))
    run.problems.unlink()
    with pytest.raises(InputError, match=r"problems.parquet: no such file"):
        curate(run, 0, recipe)
    write_problems(run, ["b"])
    with pytest.raises(InputError, match=r"plan.*not in .*problems\.parquet \(the first is a\)"):
        curate(run, 0, recipe)
    for path in (run.experience, run.questions, run.curation, run.curated(0), run.plan(1)):
        assert not path.exists()  # nothing half-written


def test_damaged_and_misplaced_files_are_named(run: RunDir) -> None:
    recipe = make_recipe()
    write_step(run, 0, group(0, "a", "1100"))
    path = run.rollouts(0) / tables.part_name(0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a readable Parquet file"):
        curate(run, 0, recipe)
    tables.read_table("verdicts", run.verdicts(0)).drop("correct").write_parquet(
        run.verdicts(0) / tables.part_name(0, 1)
    )
    path.write_bytes(whole)
    with pytest.raises(InputError, match="column correct is missing"):
        curate(run, 0, recipe)
    write_step(run, 0, group(0, "a", "1100"))
    write_rollouts(run, 0, group(1, "a", "1100"))  # verify would find nothing to do
    with pytest.raises(InputError, match="is of step 1, not of step 0"):
        curate(run, 0, recipe)
    rows = group(0, "a", "1100")
    write_step(run, 0, [*rows, rows[2]])
    with pytest.raises(InputError, match=r"s00000/a/02 is there more than once"):
        curate(run, 0, recipe)


def garble(path: Path) -> bytes:
    """Spoil a file's data and leave its footer, which says that all is well; what it was before."""
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(b"PAR1" + b"\xa5" * (len(whole) - footer - 4) + whole[-footer:])
    return whole


def test_files_garbled_behind_a_good_footer_are_named(run: RunDir) -> None:
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=True)
    write_scores(run, 3, rows, {r["rollout_id"]: 0.5 for r in rows}, prefix="replay")
    scored = next(run.scores(3).glob("replay-*"))
    judged = next(run.verdicts(3).glob("part-*"))
    for path in (run.problems, run.plan(3), scored, judged):
        whole = garble(path)
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: "):
            curate(run, 3, recipe, rebuild=True)
        path.write_bytes(whole)
    for path in (run.experience, run.plan(3)):
        whole = garble(path)
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: "):
            replay_candidates(run, 3)
        path.write_bytes(whole)


def test_an_earlier_step_that_is_not_whole_is_named(run: RunDir) -> None:
    recipe = make_recipe()
    write_step(run, 0, group(0, "a", "1100"))
    write_step(run, 1, group(1, "a", "1100"))
    shutil.rmtree(run.verdicts(0))
    with pytest.raises(InputError, match="no verdicts of step 0 yet"):
        curate(run, 1, recipe)
