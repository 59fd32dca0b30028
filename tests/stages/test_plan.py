"""The plan of the next step."""

import math
import random
import shutil
from collections import Counter

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.plan import draw_plan, first_plan
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    fill_pool,
    group,
    loaded,
    make_recipe,
    plan,
    questions,
    rebuild,
    sample_by_plan,
    vectors,
    write_plan,
    write_problems,
    write_rollouts,
    write_step,
    write_verdicts,
)


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
    with pytest.raises(InputError, match=r"curate\.fresh weighs every problem 0; nothing can be"):
        first_plan(run.problems, make_recipe(fresh="0"))
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
    with loaded(run, make_recipe()) as held:
        for seed in range(80):
            held.recipe = make_recipe(weights=weights, questions=6, seed=seed)
            made, _ = draw_plan(held, 2)
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
    with loaded(run, recipe) as held:
        for seed in range(50):
            held.recipe = recipe.model_copy(update={"seed": seed})
            made, _ = draw_plan(held, 2)
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
