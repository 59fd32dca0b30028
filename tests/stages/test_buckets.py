"""Drawing buckets: the probabilities, and what flows over."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.buckets import bucket_probabilities, draw_counts
from exgrpo_cli.experience.database import connect, fill
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.recipe import CurateSettings
from exgrpo_cli.rundir import RunDir
from making import WEIGHTS, make_recipe, vectors


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
