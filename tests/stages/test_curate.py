"""Curation: the vectors, the rules one by one, and the log as the truth."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.buckets import bucket_probabilities, draw_counts
from exgrpo_cli.experience.choose import choose, fetch_trajectories, replay_candidates
from exgrpo_cli.experience.curation import Curation
from exgrpo_cli.experience.database import connect, fill, sql_text
from exgrpo_cli.experience.history import read_plan
from exgrpo_cli.experience.plan import draw_plan, first_plan
from exgrpo_cli.experience.pool import Experience, replay_on
from exgrpo_cli.recipe import CurateSettings, Recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.stages import curate as stage
from exgrpo_cli.tables.duck import literal
from sample_log import (
    WEIGHTS,
    curate,
    group,
    make_recipe,
    plan,
    rebuild,
    row,
    text_ids,
    write_plan,
    write_problems,
    write_rollouts,
    write_scores,
    write_step,
    write_verdicts,
)

VECTORS = Path(__file__).parents[2] / ".." / "shared" / "vectors"
EXAMPLES = int(os.environ.get("EXGRPO_EXAMPLES", "25"))


def vectors(name: str) -> dict:
    path = VECTORS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def start_replay(run: RunDir, recipe: Recipe, problem: str = "zz") -> None:
    """Step 0: a success rate of 3/4 that stores nothing and lets replay start."""
    write_step(run, 0, group(0, problem, "1110"))
    curate(run, 0, recipe)


def experience(run: RunDir) -> pl.DataFrame:
    return tables.read_table("experience", run.experience)


def questions(run: RunDir) -> dict[str, dict]:
    table = tables.read_table("questions", run.questions)
    return {r["problem_id"]: r for r in table.to_dicts()}


def pool(run: RunDir) -> dict[str, list[str]]:
    """The stored rollout ids of each question."""
    stored: dict[str, list[str]] = {}
    for r in experience(run).to_dicts():
        stored.setdefault(r["problem_id"], []).append(r["rollout_id"])
    return stored


def table_bytes(run: RunDir) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (run.experience, run.questions, run.curation)}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "a run")
    write_problems(made, [*"abcdefgh", "zz"])
    return made


# --- drawing buckets ----------------------------------------------------------------------------


def bucket_log_weights(
    sizes: dict[int, int], samples: int, settings: CurateSettings
) -> dict[int, float]:
    """The log-weight of each bucket that holds questions, as the query gives it."""
    recipe = make_recipe(samples).model_copy(update={"curate": settings})
    with connect() as con:
        held = [(f"{count}/{i}", count, 1.0) for count, size in sizes.items() for i in range(size)]
        fill(con, "pool_questions", held)
        rows = Experience(con, RunDir(Path()), recipe).sql("bucket_weights", step=0)
        return {row["count"]: row["log_weight"] for row in rows}


def weights_of(method: str) -> CurateSettings:
    return CurateSettings.model_validate(WEIGHTS[method])


def test_bucket_probabilities_equal_the_vectors() -> None:
    data = vectors("bucket_probabilities")
    for case in data["cases"]:
        sizes = {int(k): n for k, n in case["sizes"].items()}
        log_weights = bucket_log_weights(sizes, case["n_rollout"], weights_of(case["method"]))
        found = bucket_probabilities(log_weights)
        for k, probability in case["probability"].items():
            assert found.get(int(k), 0.0) == pytest.approx(probability, rel=1e-8), case
    for case in data["unnormalised_weight"]:
        weight = {int(k): w for k, w in case["weight"].items()}
        found = bucket_log_weights(
            dict.fromkeys(weight, 1), case["n_rollout"], weights_of(case["method"])
        )
        for k in weight:
            ratio = math.exp(found[k] - found[1])
            assert ratio == pytest.approx(weight[k] / weight[1], rel=1e-8)
    for case in data["zero_weight"]:
        sizes = {int(k): n for k, n in case["sizes"].items()}
        log_weights = bucket_log_weights(sizes, case["n_rollout"], weights_of(case["method"]))
        if case["result"] == "refused":
            with pytest.raises(InputError, match="no question can be drawn"):
                bucket_probabilities(log_weights)
        else:
            assert bucket_probabilities(log_weights) == {
                int(k): p for k, p in case["result"].items()
            }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("normal", {1: 0.004433048175, 4: 0.3990502797, 7: 0.004433048175}),
        ("linear", {1: 0.03571428571, 4: 0.1428571429, 7: 0.25}),
        ("sqrt", {1: 0.07419733287, 4: 0.1483946657, 7: 0.1963076907}),
        ("linear_clip", {1: 0.04545454545, 4: 0.1818181818, 7: 0.1818181818}),
    ],
)
def test_bucket_probabilities_of_eight_rollouts(method: str, expected: dict[int, float]) -> None:
    sizes = {k: 10 * k for k in range(1, 8)}  # sizes do not enter
    found = bucket_probabilities(bucket_log_weights(sizes, 8, weights_of(method)))
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-8)
    assert sum(found.values()) == pytest.approx(1)


def test_sigma_widens_the_weights_and_none_underflows() -> None:
    sizes = {1: 1, 4: 1}
    rule = "exp(-0.5 * ((bucket - samples / 2.0) / 2.0) ** 2)"
    wide = bucket_log_weights(sizes, 8, CurateSettings(bucket_weight=rule))
    assert wide[4] - wide[1] == pytest.approx(0.5 * 1.5**2)
    # Far from K/2 the density itself is 0 in float64; where no other bucket is left it is drawn.
    far = bucket_log_weights({1: 2, 2: 1}, 512, weights_of("normal"))
    assert draw_counts({1: 2, 2: 1}, far, 3, random.Random(0)) == {1: 2, 2: 1}


def mean_counts(sizes: dict[int, int], method: str, draw: int, runs: int) -> dict[int, float]:
    log_weights = bucket_log_weights(sizes, 8, weights_of(method))
    rng = random.Random(1)
    total: Counter[int] = Counter()
    for _ in range(runs):
        counts = draw_counts(sizes, log_weights, draw, rng)
        assert sum(counts.values()) == draw
        assert all(counts[k] <= sizes[k] for k in counts)
        total.update(counts)
    return {k: total[k] / runs for k in sizes}


def test_overflow_equals_the_monte_carlo_vectors() -> None:
    runs = 4000
    for case in vectors("bucket_probabilities")["monte_carlo"]:
        sizes = {int(k): n for k, n in case["sizes"].items()}
        found = mean_counts(sizes, case["method"], case["draw"], runs)
        for k, mean in case["mean_count"].items():
            error = case["standard_error"][k] * math.sqrt(1 + case["runs"] / runs)
            assert abs(found[int(k)] - mean) <= 4.5 * error + 1e-9, (case["name"], k)


def test_overflow_goes_to_buckets_with_room() -> None:
    found = mean_counts({1: 40, 2: 30, 3: 4, 4: 3, 5: 5, 7: 30}, "normal", 16, 2000)
    assert found[2] == pytest.approx(3.4665, abs=0.07)
    assert found[3] == pytest.approx(3.9884, abs=0.02)
    assert mean_counts({1: 20, 4: 2}, "normal", 10, 20) == {1: 8.0, 4: 2.0}


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


# --- the limits of the pool ---------------------------------------------------------------------


def test_trajectories_leave_when_they_are_too_old(run: RunDir) -> None:
    recipe = make_recipe(max_age=2)
    fill_pool(run, recipe, {"a": "1100"})
    write_step(run, 2, group(2, "b", "1000"))
    curate(run, 2, recipe)
    assert set(pool(run)) == {"a", "b"}
    assert set(plan(run, 3)["replay"]) == {"a", "b"}  # at age 2 it is still replayed
    write_step(run, 3, group(3, "c", "0000"))
    assert curate(run, 3, recipe)["pool/questions"] == 1
    assert set(pool(run)) == {"b"}
    assert plan(run, 4)["replay"] == ["b"]
    assert questions(run)["a"]["bucket"] == "medium"  # what it was stays known
    # Sampled again, the same tokens are new: they enter with their log-probabilities of now.
    write_step(run, 4, [row(4, "a", i, i == 0, "a.s1.0", logprob=-0.5) for i in range(4)])
    curate(run, 4, recipe)
    assert pool(run) == {"a": ["s00004/a/00"]}
    assert experience(run)["mean_logprob"].to_list() == [-0.5]


def test_a_question_keeps_so_many_trajectories_the_newest(run: RunDir) -> None:
    recipe = make_recipe(max_per_question=2)
    fill_pool(run, recipe, {"a": "1110", "b": "1000"})
    assert pool(run) == {"a": ["s00001/a/00", "s00001/a/01"], "b": ["s00001/b/00"]}
    write_step(run, 2, group(2, "a", "0001"))
    curate(run, 2, recipe)
    assert pool(run) == {"b": ["s00001/b/00"], "a": ["s00001/a/00", "s00002/a/03"]}
    assert questions(run)["a"]["successes"] == 1


def test_the_pool_holds_so_many_trajectories_the_newest(run: RunDir) -> None:
    recipe = make_recipe(max_trajectories=4)
    fill_pool(run, recipe, {"a": "1110", "b": "1100"})
    # Of one step's the higher samples go first, so that each question keeps one for longest.
    assert pool(run) == {"a": ["s00001/a/00", "s00001/a/01"], "b": ["s00001/b/00", "s00001/b/01"]}
    write_step(run, 2, group(2, "c", "1110"))
    assert curate(run, 2, recipe)["pool/trajectories"] == 4
    assert pool(run) == {"b": ["s00001/b/00"], "c": [f"s00002/c/{i:02d}" for i in range(3)]}
    write_step(run, 3, group(3, "d", "1110") + group(3, "e", "1110"))
    curate(run, 3, recipe)
    assert {q: len(held) for q, held in pool(run).items()} == {"d": 2, "e": 2}


def test_other_limits_derive_anew(run: RunDir) -> None:
    fill_pool(run, make_recipe(), {"a": "1100", "b": "1000"})
    assert curate(run, 1, make_recipe())["skipped"] is True
    assert curate(run, 1, make_recipe(max_trajectories=1))["skipped"] is False
    assert pool(run) == {"b": ["s00001/b/00"]}
    write_step(run, 2, group(2, "c", "0000"))
    assert curate(run, 2, make_recipe())["rebuilt"] is True
    assert set(pool(run)) == {"a", "b"}


def test_tables_of_an_earlier_version_are_derived_anew(run: RunDir) -> None:
    fill_pool(run, make_recipe(), {"a": "1100"})
    write_step(run, 2, group(2, "c", "1000"))
    old = tables.read_table("experience", run.experience).drop("reward")
    old.write_parquet(run.experience)
    tables.write_json(run.curation, json.loads(run.curation.read_text()) | {"version": 1})
    assert curate(run, 2, make_recipe())["rebuilt"] is True
    assert set(pool(run)) == {"a", "c"}


def test_the_pool_lies_in_order_of_entry(run: RunDir) -> None:
    fill_pool(run, make_recipe(), {"b": "1110", "a": "1100"})
    write_step(run, 2, group(2, "a", "011", "replay") + group(2, "c", "1000"), parts=3)
    curate(run, 2, make_recipe())
    held = experience(run).select("step", "problem_id", "sample")
    assert held.height == 8
    assert held.rows() == sorted(held.rows())


# --- which trajectory is replayed ---------------------------------------------------------------


def prepare_choice(run: RunDir, recipe: Recipe, scored: bool) -> list[dict]:
    """Three stored successes of ``a`` (steps 1, 1, 2), to be replayed in step 3."""
    start_replay(run, recipe)
    first = [
        row(1, "a", 0, True, "first", logprob=-1.0, entropy=0.5),
        row(1, "a", 1, True, "second", logprob=-2.0, entropy=0.4),
        row(1, "a", 2, False, "third"),
        row(1, "a", 3, False, "fourth"),
    ]
    second = [row(2, "a", i, i == 1, f"later {i}", logprob=-0.5, entropy=0.6) for i in range(4)]
    if scored:
        write_scores(run, 1, first, {r["rollout_id"]: r["mean_entropy"] for r in first})
    write_step(run, 1, first)
    curate(run, 1, recipe)
    write_step(run, 2, second)
    curate(run, 2, recipe)
    write_step(run, 3, group(3, "a", "000", "replay") + group(3, "b", "0000"))
    return first + second


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        ("lowest_entropy", "s00001/a/01"),
        ("highest_entropy", "s00002/a/01"),
        ("lowest_perplexity", "s00002/a/01"),
        ("newest", "s00002/a/01"),
    ],
)
def test_selection_by_what_was_recorded(run: RunDir, selection: str, chosen: str) -> None:
    recipe = make_recipe(selection=selection)
    rows = prepare_choice(run, recipe, scored=False)
    result = curate(run, 3, recipe)
    (made,) = tables.read_table("curated", run.curated(3)).to_dicts()
    expected = next(r for r in rows if r["rollout_id"] == chosen)
    assert made["rollout_id"] == chosen
    assert made["token_ids"] == expected["token_ids"]
    assert made["prompt_ids"] == expected["prompt_ids"]
    assert made["logprobs"] == expected["logprobs"]
    assert made["logprob_source"] == "engine"
    assert made["reward"] == 1.0
    assert made["mean_entropy"] == pytest.approx(expected["mean_entropy"])
    assert (made["entropy_source"], made["entropy_policy"]) == (
        "logprobs",
        step_name(expected["step"]),
    )
    assert (made["rank"], made["candidates"], made["bucket"]) == (1, 3, "hard")
    assert (made["successes"], made["attempts"]) == (1, 4)  # the bucket before this step
    assert made["collected_step"] == expected["step"]
    assert result["replay/questions"] == 1
    assert result["replay/stale_entropies"] == 1
    assert result["replay/age_mean"] == 3 - expected["step"]


def test_selection_under_the_current_policy(run: RunDir) -> None:
    """Where the candidates were scored under π_t, that decides; old log-probs stay as recorded."""
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=True)
    now = {"s00001/a/00": 0.1, "s00001/a/01": 0.3, "s00002/a/01": 0.2}
    write_scores(run, 3, rows, now, prefix="replay", parts=2, logprob=-0.125)
    result = curate(run, 3, recipe)
    (made,) = tables.read_table("curated", run.curated(3)).to_dicts()
    assert made["rollout_id"] == "s00001/a/00"
    assert (made["entropy_source"], made["entropy_policy"]) == ("score", "step-00003")
    assert made["mean_entropy"] == pytest.approx(0.1)
    assert made["logprob_source"] == "score"
    assert made["logprobs"] == [-0.25] * len(text_ids("first"))  # of the collecting step's scores
    assert result["replay/stale_entropies"] == 0
    assert result["replay/mean_entropy"] == pytest.approx(0.1)
    held = {r["rollout_id"]: r for r in experience(run).to_dicts()}
    assert held["s00001/a/00"]["entropy_source"] == "score"
    assert held["s00002/a/01"]["entropy_source"] == "logprobs"


@contextmanager
def loaded(run: RunDir, recipe: Recipe) -> Iterator[Experience]:
    """The experience as the run's tables hold it."""
    found = Curation.read(run)
    with Experience.open(run, recipe) as experience:
        assert found is not None
        assert experience.load(found)
        yield experience


def test_random_selection_is_uniform_and_seeded(run: RunDir) -> None:
    prepare_choice(run, make_recipe(), scored=False)
    chosen: Counter[str] = Counter()
    with loaded(run, make_recipe()) as experience:
        read_plan(experience.con, run.plan(3))
        for seed in range(90):
            experience.recipe = make_recipe(selection="random", seed=seed)
            choose(experience, 3, [])
            (picked,) = experience.con.execute("SELECT rollout_id FROM chosen").fetchall()
            chosen[picked[0]] += 1
    assert len(chosen) == 3
    assert sum((n - 30) ** 2 / 30 for n in chosen.values()) < 13.8  # chi-square, p = 0.001


def test_scores_cut_in_other_parts_than_the_rollouts_are_found(run: RunDir) -> None:
    recipe = make_recipe()
    start_replay(run, recipe)
    rows = group(1, "a", "1100") + group(1, "b", "1100")
    write_scores(run, 1, rows, {r["rollout_id"]: 0.5 for r in rows}, parts=5)
    write_step(run, 1, rows, parts=2)
    curate(run, 1, recipe)
    write_step(run, 2, group(2, "a", "000", "replay") + group(2, "b", "000", "replay"))
    curate(run, 2, recipe)
    made = tables.read_table("curated", run.curated(2))
    assert made["logprob_source"].to_list() == ["score", "score"]
    assert made["problem_id"].to_list() == ["a", "b"]


def test_replay_candidates_and_their_trajectories(run: RunDir) -> None:
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=False)
    curate(run, 3, recipe)
    found = replay_candidates(run, 3)  # as they stood before step 3, also when asked later
    assert found["rollout_id"].to_list() == ["s00001/a/00", "s00001/a/01", "s00002/a/01"]
    assert found["part"][0] == "rollouts/step-00001/part-00000-of-00001.parquet"
    assert found["problem_id"].unique().to_list() == ["a"]
    reverse = found.reverse()
    fetched = fetch_trajectories(run.root, reverse)
    by_id = {r["rollout_id"]: r for r in rows}
    assert fetched["rollout_id"].to_list() == reverse["rollout_id"].to_list()
    for entry in fetched.to_dicts():
        assert entry["token_ids"] == by_id[entry["rollout_id"]]["token_ids"]
        assert entry["prompt_ids"] == by_id[entry["rollout_id"]]["prompt_ids"]
    assert replay_candidates(run, 1).height == 0
    assert fetch_trajectories(run.root, found.clear()).height == 0
    shutil.rmtree(run.rollouts(1))
    with pytest.raises(InputError, match="stored trajectories lie in it"):
        fetch_trajectories(run.root, found)


def spoil_lists(path: Path) -> None:
    """Overwrite the bytes of a file's list columns, and check that they cannot be read any more."""
    chunks = duckdb.execute(
        "SELECT coalesce(dictionary_page_offset, data_page_offset), total_compressed_size"
        " FROM parquet_metadata($1)"
        " WHERE regexp_matches(path_in_schema, '^(prompt_ids|token_ids|logprobs|text)')",
        literal([path]),
    ).fetchall()
    assert len(chunks) == 4
    data = bytearray(path.read_bytes())
    for start, size in chunks:
        data[start : start + size] = b"\xff" * size
    path.write_bytes(bytes(data))
    with pytest.raises(InputError):
        tables.read_table("rollouts", path, ["token_ids"])


def test_token_lists_are_read_for_chosen_rows_only(run: RunDir) -> None:
    recipe = make_recipe()
    prepare_choice(run, recipe, scored=False)
    write_step(run, 2, group(2, "c", "1100", entropy=0.1))  # not a question to replay
    for step in (0, 2, 3):
        for path in run.rollouts(step).glob("*.parquet"):
            spoil_lists(path)
    result = curate(run, 3, recipe)  # derives all from the log, and chooses from step 1
    assert result["rebuilt"] is True
    made = tables.read_table("curated", run.curated(3))
    assert made["rollout_id"].to_list() == ["s00001/a/01"]
    assert set(pool(run)) == {"a", "c"}


# --- the plan of the next step ------------------------------------------------------------------


def fill_pool(run: RunDir, recipe: Recipe, patterns: dict[str, str]) -> None:
    start_replay(run, recipe)
    write_step(run, 1, [r for q, pattern in patterns.items() for r in group(1, q, pattern)])
    curate(run, 1, recipe)


def test_first_plan_is_seeded_and_takes_each_question_once(run: RunDir) -> None:
    made = first_plan(run.problems, make_recipe(questions=5))
    assert made.schema == tables.polars_schema("plan")
    assert made.height == made["problem_id"].n_unique() == 5
    assert set(made["role"]) == {"fresh"}
    assert set(made["samples"]) == {4}
    assert set(made["step"]) == {0}
    assert made.equals(first_plan(run.problems, make_recipe(questions=5)))
    other = first_plan(run.problems, make_recipe(questions=5, seed=1))
    assert made["problem_id"].to_list() != other["problem_id"].to_list()
    lines: list[str] = []
    assert first_plan(run.problems, make_recipe(questions=50), lines.append).height == 9
    assert "9 problems, fewer than curate.questions = 50" in lines[0]
    # The same on every machine and in every version: the order is by MD5.
    assert made["problem_id"].to_list() == FIRST_FIVE


FIRST_FIVE = ["b", "d", "a", "h", "c"]


def test_ratio_is_met_exactly_and_no_question_is_planned_twice(run: RunDir) -> None:
    patterns = dict.fromkeys("abcdef", "1100")
    write_problems(run, [*"abcdef", *[f"q{i}" for i in range(20)], "zz"])
    for ratio, size, replayed in ((0.5, 8, 4), (0.3, 10, 3), (0.29, 100, 6), (0.0, 8, 0)):
        recipe = make_recipe(questions=size, replay_ratio=ratio)
        shutil.rmtree(run.root / "plan", ignore_errors=True)
        fill_pool(run, recipe, patterns)
        table = tables.read_table("plan", run.plan(2))
        made = plan(run, 2)
        assert len(made["replay"]) == replayed
        assert len(made["fresh"]) == min(size, 27) - replayed
        assert table["problem_id"].n_unique() == table.height
        samples = dict(zip(table["role"], table["samples"], strict=True))
        assert samples == {"fresh": 4} | ({"replay": 3} if replayed else {})
        counted = table.filter(pl.col("role") == "replay")
        assert set(zip(counted["successes"], counted["attempts"], strict=True)) <= {(2, 4)}


def test_fresh_questions_fill_where_the_pool_is_small(run: RunDir) -> None:
    fill_pool(run, make_recipe(questions=6), {"a": "1100"})
    assert [len(plan(run, 2)[role]) for role in ("fresh", "replay")] == [5, 1]


@pytest.mark.parametrize("weights", ["normal", "uniform"])
def test_draws_of_questions_follow_the_probabilities(run: RunDir, weights: str) -> None:
    """Over many seeds, how often each question is planned: chi-square against the weights."""
    sizes = {1: 4, 2: 6, 3: 4}
    names = {k: [f"k{k}n{i}" for i in range(n)] for k, n in sizes.items()}
    write_problems(run, ["zz", *[q for k in names for q in names[k]]])
    patterns = {q: "1" * k + "0" * (4 - k) for k in names for q in names[k]}
    fill_pool(run, make_recipe(), patterns)
    draws, drawn = 0, Counter[str]()
    with loaded(run, make_recipe()) as experience:
        for seed in range(80):
            experience.recipe = make_recipe(weights=weights, questions=6, seed=seed)
            made, _ = draw_plan(experience, 2)
            replayed = made.filter(pl.col("role") == "replay")["problem_id"].to_list()
            assert len(set(replayed)) == 3
            drawn.update(replayed)
            draws += 3  # no bucket is smaller, so nothing flows over
    weight = {
        "normal": {k: math.exp(-((k - 2) ** 2) / 2) for k in sizes},
        "uniform": dict(sizes),
    }[weights]
    chi_square = 0.0
    for k, members in names.items():
        expected = draws * weight[k] / sum(weight.values()) / len(members)
        chi_square += sum((drawn[q] - expected) ** 2 / expected for q in members)
    assert chi_square < 34.5  # 13 degrees of freedom, p = 0.001


@pytest.mark.parametrize("method", ["normal", "linear", "sqrt", "linear_clip"])
def test_planned_questions_follow_the_vectors(run: RunDir, method: str) -> None:
    """Whole plans over many seeds against the probabilities of the public implementation."""
    probability = next(
        {int(k): p for k, p in case["probability"].items()}
        for case in vectors("bucket_probabilities")["cases"]
        if case["method"] == method and case["n_rollout"] == 8 and len(case["probability"]) == 7
    )
    sizes = dict.fromkeys(probability, 6)
    names = {f"k{k}n{i}": k for k, n in sizes.items() for i in range(n)}
    write_problems(run, ["zz", *names])
    recipe = make_recipe(samples=8, questions=12, weights=method)
    write_step(run, 0, group(0, "zz", "11111000"))
    curate(run, 0, recipe)
    write_step(run, 1, [r for q, k in names.items() for r in group(1, q, "1" * k + "0" * (8 - k))])
    curate(run, 1, recipe)
    drawn: Counter[int] = Counter()
    with loaded(run, recipe) as experience:
        for seed in range(50):
            experience.recipe = recipe.model_copy(update={"seed": seed})
            made, _ = draw_plan(experience, 2)
            replayed = made.filter(pl.col("role") == "replay")["problem_id"].to_list()
            drawn.update(names[q] for q in replayed)  # six, and no bucket is smaller
    draws = sum(drawn.values())
    assert draws == 300
    common = {k: p for k, p in probability.items() if draws * p >= 5}
    rest = 1 - sum(common.values())
    found = [(drawn[k], draws * p) for k, p in common.items()]
    if draws * rest > 1:
        found.append((sum(drawn[k] for k in probability.keys() - common.keys()), draws * rest))
    chi_square = sum((n - expected) ** 2 / expected for n, expected in found)
    assert chi_square < 22.5  # at most 6 degrees of freedom, p = 0.001


def sample_by_plan(run: RunDir, step: int, pattern: str = "0000") -> list[str]:
    """Roll out what was planned; the fresh questions."""
    made = plan(run, step)
    rows = [r for q in made["fresh"] for r in group(step, q, pattern)]
    rows += [r for q in made["replay"] for r in group(step, q, "000", "replay")]
    write_rollouts(run, step, rows)
    write_verdicts(run, step, rows)
    return made["fresh"]


def test_each_fresh_question_once_an_epoch(run: RunDir) -> None:
    names = [f"q{i}" for i in range(10)]
    write_problems(run, names)
    recipe = make_recipe(questions=4)
    tables.write_table("plan", first_plan(run.problems, recipe), run.plan(0))
    drawn: list[str] = []
    for step in range(8):
        drawn += sample_by_plan(run, step)
        result = curate(run, step, recipe)
        table = tables.read_table("plan", run.plan(step + 1))
        assert table["problem_id"].n_unique() == table.height == 4
    assert result["plan/epoch"] == 3
    epochs = [drawn[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == names for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3  # each in an order of its own
    before = questions(run)
    rebuild(run, 7, recipe)  # the epochs follow from the log
    assert questions(run) == before


def test_replayed_and_retired_questions_keep_the_epochs(run: RunDir) -> None:
    names = [f"q{i}" for i in range(12)]
    write_problems(run, names)
    recipe = make_recipe(questions=4, start_success=0.0)
    tables.write_table("plan", first_plan(run.problems, recipe), run.plan(0))
    times: Counter[str] = Counter()
    rng = random.Random(3)
    for step in range(12):
        made = plan(run, step)
        assert not set(made["fresh"]) & set(made["replay"])
        times.update(made["fresh"])
        asked = questions(run) if step else {}
        for q in made["fresh"] + made["replay"]:
            assert asked.get(q, {}).get("retired_step") is None
        epoch = max((asked[q]["epoch"] or 0 for q in asked), default=0)
        for q in names:  # never more than once an epoch
            assert times[q] <= epoch + 2
        rows = [
            r
            for role in ("fresh", "replay")
            for q in made[role]
            for r in group(
                step,
                q,
                "".join(rng.choice("0111") for _ in range(4 if role == "fresh" else 3)),
                role,
            )
        ]
        if not rows:
            break
        write_rollouts(run, step, rows)
        write_verdicts(run, step, rows)
        curate(run, step, recipe)
    assert any(q["retired_step"] is not None for q in questions(run).values())


def test_a_planned_question_without_rollouts_had_its_turn(run: RunDir) -> None:
    """A prompt that is too long is left out by the rollout stage; it does not block the epoch."""
    write_problems(run, ["a", "b", "c"])
    recipe = make_recipe(questions=1)
    planned = {"step": 0, "problem_id": "a", "role": "fresh", "samples": 4}
    write_step(run, 0, group(0, "b", "0000"))
    write_plan(run, 0, group(0, "b", "0000"), extra=[planned])
    curate(run, 0, recipe)
    assert questions(run)["a"]["epoch"] == 0
    assert plan(run, 1)["fresh"] == ["c"]
    assert curate(run, 0, recipe, force=True)["solve/none"] == 1.0


# --- the log is the truth -----------------------------------------------------------------------


def test_curating_twice_changes_nothing(run: RunDir) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000"})
    before = table_bytes(run) | {"plan": run.plan(2).read_bytes()}
    lines: list[str] = []
    again = curate(run, 1, recipe, log=lines.append)
    assert again["skipped"] is True
    assert again["pool/trajectories"] == 3
    assert lines == ["step 1 is curated already"]
    assert table_bytes(run) | {"plan": run.plan(2).read_bytes()} == before
    forced = curate(run, 1, recipe, force=True)
    assert forced["skipped"] is False
    assert table_bytes(run) | {"plan": run.plan(2).read_bytes()} == before
    kept = {k: v for k, v in again.items() if "/" in k and k != "curate/seconds"}
    assert {k: forced[k] for k in kept} == kept
    (line,) = [m for m in run.read_metrics() if m["step"] == 1]
    assert line["pool/trajectories"] == 3


def test_other_settings_or_another_log_derive_anew(run: RunDir) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000"})
    write_step(run, 2, group(2, "b", "0000"))
    assert curate(run, 2, recipe)["rebuilt"] is False
    write_step(run, 3, group(3, "b", "0000"))
    assert curate(run, 3, make_recipe(lower=1))["rebuilt"] is True
    assert set(pool(run)) == {"a"}
    # A re-run verification that judges otherwise, in a file of the same size or not.
    write_verdicts(run, 1, group(1, "a", "1110") + group(1, "b", "0000"))
    write_step(run, 4, group(4, "b", "0000"))
    assert curate(run, 4, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3
    run.experience.write_bytes(run.experience.read_bytes()[:-20])
    write_step(run, 5, group(5, "b", "0000"))
    assert curate(run, 5, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3
    run.questions.unlink()
    write_step(run, 6, group(6, "b", "0000"))
    assert curate(run, 6, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3


def test_scores_of_candidates_that_come_late_change_the_choice(run: RunDir) -> None:
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=False)
    curate(run, 3, recipe)
    now = {"s00001/a/00": 0.1, "s00001/a/01": 0.3, "s00002/a/01": 0.2}
    write_scores(run, 3, rows, now, prefix="replay")
    assert curate(run, 3, recipe)["skipped"] is False
    assert tables.read_table("curated", run.curated(3))["rollout_id"].to_list() == ["s00001/a/00"]
    assert curate(run, 3, recipe)["skipped"] is True


def test_settings_of_planning_need_no_rebuilding_but_are_not_skipped(run: RunDir) -> None:
    fill_pool(run, make_recipe(), {"a": "1100", "b": "1000"})
    assert curate(run, 1, make_recipe())["skipped"] is True
    assert curate(run, 1, make_recipe(questions=2))["skipped"] is False
    assert tables.read_table("plan", run.plan(2)).height == 2
    write_step(run, 2, group(2, "b", "0000"))
    assert curate(run, 2, make_recipe(selection="newest"))["rebuilt"] is False


def test_what_was_used_is_left_as_it_is(run: RunDir) -> None:
    recipe = make_recipe()
    prepare_choice(run, recipe, scored=False)
    curate(run, 3, recipe)
    sample_by_plan(run, 4)
    run.policy(4).mkdir(parents=True)
    used = {p: p.read_bytes() for p in (run.curated(3), run.plan(4))}
    lines: list[str] = []
    other = make_recipe(selection="newest", questions=2)
    again = curate(run, 3, other, log=lines.append)
    assert {p: p.read_bytes() for p in used} == used
    assert (again["replay/age_mean"], again["plan/fresh"]) == (2, 3)  # of what is there
    assert sum("is left as it is" in line for line in lines) == 2
    curate(run, 3, other, force=True)
    assert tables.read_table("curated", run.curated(3))["rollout_id"].to_list() == ["s00002/a/01"]
    assert tables.read_table("plan", run.plan(4)).height == 2


def test_a_step_that_was_passed_over_is_taken_in_later(run: RunDir) -> None:
    recipe = make_recipe()
    start_replay(run, recipe)
    write_step(run, 1, group(1, "a", "1100"))
    write_step(run, 2, group(2, "b", "1100"))
    curate(run, 2, recipe)  # step 1 was never curated, but is in the log
    assert set(pool(run)) == {"a", "b"}
    curate(run, 1, recipe)
    assert json.loads(run.curation.read_text())["last_step"] == 2  # done out of order, nothing lost


HARNESS = """
import os, signal, sys
from pathlib import Path
from exgrpo_cli.recipe import parse_recipe
from exgrpo_cli.stages.curate import curate
from exgrpo_cli.step import Step

# Dies when the n-th file is about to be put in its place.
left, real = int(sys.argv[2]), Path.replace

def replace(self, target):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)

Path.replace = replace
values = {"rollout": {"samples": 4}, "curate": {"questions": 4}}
curate(Step.of(sys.argv[1], 2), parse_recipe(values, "test"))
"""


def test_killed_between_any_two_files_it_ends_right(run: RunDir, tmp_path: Path) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000", "c": "1110"})
    write_step(run, 2, group(2, "a", "010", "replay") + group(2, "d", "1100"))
    script = tmp_path / "harness.py"
    script.write_text(textwrap.dedent(HARNESS), encoding="utf-8")
    whole = RunDir(tmp_path / "whole")
    copy_run(run, whole)
    curate(whole, 2, recipe)
    kills = 0
    for n in range(1, 20):
        broken = RunDir(tmp_path / f"killed-{n}")
        copy_run(run, broken)
        done = subprocess.run(
            [sys.executable, str(script), str(broken.root), str(n)], capture_output=True, text=True
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        assert not broken.plan(3).exists()  # the plan comes last
        result = curate(broken, 2, recipe)
        assert result["pool/trajectories"] == 9
        assert experience(broken).equals(experience(whole))
        assert questions(broken) == questions(whole)
        assert broken.plan(3).read_bytes() == whole.plan(3).read_bytes()
        assert broken.curated(2).read_bytes() == whole.curated(2).read_bytes()
    assert kills == 7  # curated, two tables, curation.json, two files of metrics, plan


def copy_run(source: RunDir, target: RunDir) -> None:
    """A copy with its files' times, so that its log counts as unchanged."""
    shutil.copytree(source.root, target.root)
    for path in source.root.rglob("*.parquet"):
        status = path.stat()
        copied = target.root / path.relative_to(source.root)
        os.utime(copied, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- random histories ---------------------------------------------------------------------------


class Reference:
    """The experience as plain Python: dictionaries and lists, a group at a time."""

    def __init__(self, recipe: Recipe, limits: dict) -> None:
        self.curate = recipe.curate
        self.limits = limits
        self.pool: dict[str, dict[str, dict]] = {}
        self.bucket: dict[str, tuple[int, int]] = {}
        self.retired: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.replayed: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self.replay_from: int | None = None

    def away(self, problem: str, step: int) -> bool:
        if problem not in self.retired:
            return False
        after = self.curate.revive_after
        return after is None or step < self.retired[problem] + after

    def step(self, step: int, rows: list[dict], scored: dict[str, float]) -> None:
        on = self.replay_from is not None and self.replay_from <= step
        groups: dict[tuple[str, str], list[dict]] = {}
        for r in rows:
            groups.setdefault((r["problem_id"], r["role"]), []).append(r)
        current = max(self.epoch.values(), default=0)
        solved_rows = all_rows = 0
        away = {q for q, _ in groups if self.away(q, step)}
        stored = {q for q, held in self.pool.items() if held}
        retired_before = set(self.retired)
        full = {q for (q, _), g in groups.items() if all(r["correct"] for r in g)}
        for problem, role in sorted(groups, key=lambda key: (key[1] == "fresh", key[0])):
            members = sorted(groups[problem, role], key=lambda r: r["sample"])
            extra = int(role == "replay" and problem in stored)
            right = [r for r in members if r["correct"]]
            solved_rows += len(right) + extra
            all_rows += len(members) + extra
            self.last[problem] = step
            if role == "replay":
                self.replayed[problem] += 1
            else:
                seen = self.epoch.get(problem)
                due = current if seen is None else seen + 1
                self.epoch[problem] = max(due, current) if problem in retired_before else due
            if problem in away:
                continue
            if problem in full:
                self.retired[problem] = step
                self.pool.pop(problem, None)
                self.bucket.pop(problem, None)
                continue
            self.retired.pop(problem, None)
            k = len(right) + (extra if self.curate.count_replayed else 0)
            if not (on or self.curate.store_before_start) or k == 0:
                continue
            self.bucket[problem] = (len(right) + extra, len(members) + extra)
            if k > self.limits["lower"]:
                held = self.pool.setdefault(problem, {})
                for r in right:
                    held.setdefault(r["token_hash"], r | {"scored": scored.get(r["rollout_id"])})
        if self.replay_from is None and solved_rows / all_rows > self.curate.start_success:
            self.replay_from = step + 1
        self.prune(step + 1)

    def prune(self, following: int) -> None:
        """Leave what the pool may hold before the following step; the first to go come first."""
        limits = self.limits
        everything = [(leaving(r), q, h) for q, p in self.pool.items() for h, r in p.items()]
        surplus = 0
        if limits["max_trajectories"] is not None:
            surplus = max(0, len(everything) - limits["max_trajectories"])
        beyond = {(q, h) for _, q, h in sorted(everything)[:surplus]}
        for q, held in self.pool.items():
            order = sorted(held, key=lambda h: leaving(held[h]))
            surplus = 0
            if limits["max_per_question"] is not None:
                surplus = max(0, len(order) - limits["max_per_question"])
            if limits["max_age"] is not None:
                oldest = following - limits["max_age"]
                surplus = max(surplus, sum(r["step"] < oldest for r in held.values()))
            self.pool[q] = {h: held[h] for h in order[surplus:] if (q, h) not in beyond}


def leaving(r: dict) -> tuple[int, int, str]:
    """Old ones leave first; of a step's, those with the highest sample numbers."""
    return (r["step"], -r["sample"], r["rollout_id"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Recipe, dict, list[dict], list[tuple]]:
    """A recipe and its limits, the log's steps, and a sequence of things that happen to the run."""
    limits = {
        "lower": draw(st.sampled_from([0, 0, 1])),
        "max_age": draw(st.sampled_from([None, None, 1, 2])),
        "max_per_question": draw(st.sampled_from([None, None, 1, 2])),
        "max_trajectories": draw(st.sampled_from([None, None, 1, 4])),
    }
    recipe = make_recipe(
        seed=draw(st.integers(0, 3)),
        questions=draw(st.integers(1, 5)),
        start_success=draw(st.sampled_from([0.0, 0.3, 0.5])),
        store_before_start=draw(st.booleans()),
        count_replayed=draw(st.booleans()),
        revive_after=draw(st.sampled_from([None, None, 1, 2])),
        weights=draw(st.sampled_from(["normal", "linear", "uniform"])),
        selection=draw(st.sampled_from(["lowest_entropy", "random", "newest"])),
        **limits,
    )
    steps = []
    for step in range(draw(st.integers(2, 4))):
        kinds = draw(
            st.lists(
                st.tuples(st.sampled_from("abcd"), st.sampled_from(["fresh", "replay"])),
                min_size=1,
                max_size=4,
                unique=True,
            )
        )
        rows = []
        for problem, role in kinds:
            for i in range(4 if role == "fresh" else 3):
                sample = i + int(role == "replay")
                # Few different texts, so that equal trajectories are common.
                text = f"t{draw(st.integers(0, 5))}"
                right = draw(st.sampled_from([True, True, False]))
                logprob = -draw(st.integers(1, 8)) / 8
                rows.append(row(step, problem, sample, right, text, role, logprob))
        steps.append(
            {"rows": rows, "parts": draw(st.integers(1, 3)), "scored": draw(st.booleans())}
        )
    last = len(steps) - 1
    at = st.integers(0, last)
    events = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("arrive"), at),
                st.tuples(st.just("curate"), at),
                st.tuples(st.just("verify"), at, st.randoms(use_true_random=False)),
                st.tuples(st.just("score"), at),
                st.tuples(st.just("late"), at),
                st.tuples(st.just("rebuild"), at),
            ),
            max_size=5,
        )
    )
    # In the end all is curated in order; then something of the log changes once more.
    events += [("curate", step) for step in range(last + 1)]
    events.append(
        draw(
            st.one_of(
                st.tuples(st.just("verify"), at, st.randoms(use_true_random=False)),
                st.tuples(st.just("score"), at),
            )
        )
    )
    return recipe, limits, steps, [*events, ("curate", last)]


def arrive(run: RunDir, step: int, history: dict) -> None:
    write_rollouts(run, step, history["rows"], history["parts"])
    write_verdicts(run, step, history["rows"], history["parts"])
    if history["scored"]:
        score(run, step, history)


def score(run: RunDir, step: int, history: dict) -> None:
    entropy = scores_of(history)
    write_scores(run, step, history["rows"], entropy, parts=history["parts"])


def scores_of(history: dict) -> dict[str, float]:
    return {r["rollout_id"]: (i % 5) / 4 for i, r in enumerate(history["rows"])}


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(histories())
def test_incremental_equals_rebuilt_over_random_histories(
    history: tuple[Recipe, dict, list[dict], list[tuple]],
) -> None:
    recipe, limits, steps, events = history
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "fsync", lambda path: None)  # no power cut is tested here
        run = RunDir(Path(folder) / "run")
        write_problems(run, [*"abcdef"])
        there: set[int] = set()
        for event, step, *more in events:
            if event == "arrive" or (event == "curate" and step not in there):
                write_plan(run, step, steps[step]["rows"])
                arrive(run, step, steps[step])
                there.add(step)
            if step not in there:
                continue
            if event == "curate":
                curate(run, step, recipe)
            elif event == "verify":  # verified again, and judged otherwise
                for r in steps[step]["rows"]:
                    r["correct"] = r["correct"] ^ (more[0].random() < 0.4)
                write_verdicts(run, step, steps[step]["rows"], steps[step]["parts"])
            elif event == "score":
                steps[step]["scored"] = True
                score(run, step, steps[step])
            elif event == "late":  # a shard of it is away for a while, and curation says so
                part = next(iter(sorted(run.rollouts(step).glob("*.parquet"))))
                away = run.root / part.name
                part.rename(away)
                with pytest.raises(InputError, match=r"parts are missing|no \.parquet"):
                    curate(run, step, recipe, force=True)
                away.rename(part)
            elif event == "rebuild":
                rebuild(run, step, recipe)
        last = len(steps) - 1
        incremental = (experience(run), tables.read_table("questions", run.questions))
        assert json.loads(run.curation.read_text())["last_step"] == last
        rebuild(run, last, recipe)
        assert experience(run).equals(incremental[0])
        assert tables.read_table("questions", run.questions).equals(incremental[1])

        reference = Reference(recipe, limits)
        for step in range(last + 1):
            scored = scores_of(steps[step]) if steps[step]["scored"] else {}
            reference.step(step, steps[step]["rows"], scored)
        asked = questions(run)
        assert set(asked) == set(reference.last)
        for q, found in asked.items():
            assert found["last_step"] == reference.last[q]
            assert found["times_replayed"] == reference.replayed[q]
            assert found["epoch"] == reference.epoch.get(q)
            assert found["retired_step"] == reference.retired.get(q)
            counts = (found["successes"], found["attempts"])
            assert counts == reference.bucket.get(q, (None, None))
        held = {(r["problem_id"], r["token_hash"]): r for r in experience(run).to_dicts()}
        expected = {(q, h): r for q, pool_ in reference.pool.items() for h, r in pool_.items()}
        assert set(held) == set(expected)
        for key, r in expected.items():
            assert held[key]["rollout_id"] == r["rollout_id"]
            entropy = r["mean_entropy"] if r["scored"] is None else r["scored"]
            assert held[key]["mean_entropy"] == pytest.approx(entropy)
        after = json.loads(run.curation.read_text())
        assert after["replay_from"] == reference.replay_from


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
    with pytest.raises(InputError, match="is of another step than 0"):
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


# --- views --------------------------------------------------------------------------------------


def test_views_have_the_tables_columns_with_and_without_files(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(con: duckdb.DuckDBPyConnection, name: str) -> dict[str, str]:
        return {r[0]: r[1].replace('"', "") for r in con.execute(f"DESCRIBE {name}").fetchall()}

    def check(place: Path, counts: dict[str, int]) -> None:
        monkeypatch.chdir(place)
        with duckdb.connect() as con:
            con.execute(sql_text("views")).fetchall()
            for name, count in counts.items():
                expected = {c: kind for c, (kind, _, _) in tables.SCHEMAS[name].items()}
                found = columns(con, name)
                found.pop("file", None)
                assert found == expected, name
                assert con.execute(f"SELECT count(*) FROM {name}").fetchall() == [(count,)], name

    empty = tmp_path / "empty"
    empty.mkdir()
    check(empty, dict.fromkeys(tables.SCHEMAS, 0))
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=True)
    curate(run, 3, recipe)
    counts = {"problems": 9, "rollouts": 19, "verdicts": 19, "scores": 4, "curated": 1}
    counts |= {"experience": 3, "questions": 3}
    check(run.root, counts)
    assert len(rows) == 8


def test_views_load_in_the_duckdb_program(run: RunDir) -> None:
    program = shutil.which("duckdb")
    if program is None:
        pytest.skip("the duckdb program is not installed")
    fill_pool(run, make_recipe(), {"a": "1100"})
    views = Path(stage.__file__).parents[1] / "experience" / "sql" / "views.sql"
    done = subprocess.run(
        [program, "-init", str(views), "-csv", "-c", "SELECT count(*) AS n FROM experience"],
        cwd=run.root,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["n", "2"], done.stderr
