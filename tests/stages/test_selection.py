"""The limits of the pool, and which of its trajectories is replayed."""

import json
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import choose, fetch_trajectories, replay_candidates
from exgrpo_cli.experience.history import StepFiles, read_plan
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.tables.duck import literal
from making import (
    curate,
    experience,
    fill_pool,
    group,
    loaded,
    make_recipe,
    plan,
    pool,
    prepare_choice,
    questions,
    row,
    start_replay,
    text_ids,
    write_scores,
    write_step,
)

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


def test_random_selection_is_uniform_and_seeded(run: RunDir) -> None:
    prepare_choice(run, make_recipe(), scored=False)
    chosen: Counter[str] = Counter()
    with loaded(run, make_recipe()) as held:
        read_plan(held.con, run.plan(3), 3)
        for seed in range(90):
            held.recipe = make_recipe(selection="random", seed=seed)
            choose(held, 3, StepFiles.of(run, 3))
            chosen[held.con.execute("SELECT rollout_id FROM chosen").fetchall()[0][0]] += 1
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
