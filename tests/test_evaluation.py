"""pass@k, avg@k and bootstrap intervals."""

from io import StringIO
from itertools import combinations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exgrpo_cli.evaluation import (
    average_of_sources,
    bootstrap_interval,
    format_table,
    pass_at_k,
    powers_of_two,
    summarise,
    t_half_width,
)


@st.composite
def _counts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(_counts())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(
    counts: tuple[int, int, int],
) -> None:
    n, c, k = counts
    right = [i < c for i in range(n)]
    subsets = list(combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_known_values() -> None:
    # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k([4, 4, 4], [0, 1, 4], 4).tolist() == [0.0, 1.0, 1.0]
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)  # no overflow


def test_pass_at_k_refuses_what_it_cannot_estimate() -> None:
    with pytest.raises(ValueError, match="pass@8 needs"):
        pass_at_k([8, 4], [1, 1], 8)
    with pytest.raises(ValueError, match="outside"):
        pass_at_k(4, 5, 1)


def test_the_mean_pass_at_1_weighs_problems_alike() -> None:
    # A problem with more samples weighs no more: (1/4 + 1/1) / 2, not 2/5.
    assert pass_at_k([4, 1], [1, 1], 1).mean() == pytest.approx(0.625)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=40),
    st.integers(0, 2**32),
    st.randoms(use_true_random=False),
)
def test_interval_holds_the_mean_and_depends_on_seed_and_values_alone(values, seed, random) -> None:
    shares = np.array(values) / 8
    low, high = bootstrap_interval(shares, 200, seed)
    assert 0.0 <= low <= shares.mean() <= high <= 1.0
    shuffled = list(shares)
    random.shuffle(shuffled)
    assert bootstrap_interval(shuffled, 200, seed) == (low, high)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_interval_of_all_or_nothing_is_wilsons_and_holds_the_mean(share: float) -> None:
    for problems in range(1, 300):
        low, high = bootstrap_interval([share] * problems, 10, 0)
        ends = (low, high) if share == 0 else (1 - high, 1 - low)
        assert ends == (0.0, pytest.approx(1.96**2 / (problems + 1.96**2), rel=1e-4))


def test_interval_width_is_that_of_the_standard_error() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 5, size=400) / 4
    low, high = bootstrap_interval(values, 4000, seed=1)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    narrow = bootstrap_interval(values, 4000, seed=1, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(400):
        chances = rng.beta(2, 3, size=60)  # true mean 0.4
        low, high = bootstrap_interval(rng.binomial(4, chances) / 4, 500, seed=trial)
        hits += low <= 0.4 <= high
    assert 0.91 <= hits / 400 <= 0.98


def test_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([0.3, 0.3, 0.3], 100, 0) == pytest.approx((0.3, 0.3))
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([], 100, 0)


def test_powers_of_two() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(7) == [1, 2, 4]
    assert powers_of_two(8) == [1, 2, 4, 8]


def _samples(marks: dict[str, tuple[str, str]]) -> pl.DataFrame:
    """problem -> (source, one character a sample: 1 right, 0 wrong, x cut off)."""
    return pl.DataFrame(
        [
            {
                "problem_id": problem,
                "source": source,
                "correct": mark == "1",
                "finish_reason": "length" if mark == "x" else "stop",
                "tokens": 10 + i,
            }
            for problem, (source, row) in marks.items()
            for i, mark in enumerate(row)
        ]
    )


def test_summarise_by_source_and_overall() -> None:
    frame = _samples({"a": ("aime", "1000"), "b": ("aime", "0xx0"), "c": ("math", "1111")})
    rows, overall = summarise(frame, [1, 2, 4], 200, seed=0)
    aime, math = rows
    assert [row["source"] for row in rows] == ["aime", "math"]
    assert (aime["problems"], aime["samples"]) == (2, 8)
    assert aime["pass@1"] == pytest.approx(1 / 8)
    assert aime["pass@2"] == pytest.approx((1 / 2 + 0) / 2)
    assert aime["pass@4"] == pytest.approx(1 / 2)
    assert aime["truncated"] == pytest.approx(2 / 8)
    assert aime["tokens"] == pytest.approx(11.5)
    assert (math["low"], math["pass@1"], math["high"]) == (pytest.approx(0.2065, abs=1e-4), 1, 1)
    assert overall["pass@1"] == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert overall["low"] < overall["pass@1"] < overall["high"]
    assert overall["pass@4_low"] <= overall["pass@4"] <= overall["pass@4_high"]


def test_sources_with_other_numbers_of_samples() -> None:
    frame = _samples({"a": ("aime", "1000"), "b": ("aime", "0000"), "c": ("math", "1")})
    (aime, math), overall = summarise(frame, [1, 2, 4], 200, seed=0)
    assert aime["pass@4"] == pytest.approx(1 / 2)
    assert "pass@2" not in math
    assert "pass@2" not in overall
    assert overall["pass@1"] == pytest.approx((1 / 4 + 0 + 1) / 3)
    average = average_of_sources(frame, 200, seed=0)
    assert average is not None
    assert average["pass@1"] == pytest.approx((1 / 8 + 1) / 2)
    assert average_of_sources(frame.filter(pl.col("source") == "aime"), 200, seed=0) is None


def test_the_interval_of_the_average_is_that_of_its_standard_error() -> None:
    rng = np.random.default_rng(0)
    marks = {
        f"{source}{i}": (source, "".join(map(str, rng.integers(0, 2, size=4))))
        for source, count in (("large", 900), ("small", 100))
        for i in range(count)
    }
    frame = _samples(marks)
    average = average_of_sources(frame, 4000, seed=1)
    assert average is not None
    shares = {
        s: np.array([m.count("1") / 4 for t, m in marks.values() if t == s])
        for s in ("large", "small")
    }
    error = np.sqrt(sum(v.var() / v.size for v in shares.values())) / 2
    assert average["high"] - average["low"] == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert average_of_sources(frame.sample(fraction=1.0, shuffle=True, seed=2), 4000, 1) == average


def test_summarise_does_not_depend_on_row_order() -> None:
    frame = _samples({str(i): ("s", f"{i % 16:04b}") for i in range(30)})
    assert summarise(frame, [1, 4], 200, 3) == summarise(
        frame.sample(fraction=1.0, shuffle=True, seed=1), [1, 4], 200, 3
    )


def test_format_table_shows_sources_literally_and_the_overall_line_last() -> None:
    frame = _samples({"a": ("[red]aime[/red]", "10"), "b": ("math", "11")})
    rows, overall = summarise(frame, [1, 2], 200, 0)
    summary = {
        "policy": "step-00003",
        "samples": 2,
        "temperature": 0.6,
        "rows": rows,
        "overall": overall,
    }
    console = Console(width=80, record=True, file=StringIO())
    console.print(format_table(summary))
    lines = [line for line in console.export_text().splitlines() if "%  " in line]
    assert lines[0].startswith("[red]aime[/red]")
    assert "50.0% [50.0%, 50.0%]" in lines[0]
    assert lines[-1].startswith("overall")
    assert "75.0% [50.0%, 100.0%]" in lines[-1]


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (31, 2.04227)]
)
def test_t_half_widths_known_values(n: int, t: float) -> None:
    values = [0.1, 0.3, *[0.2] * (n - 2)]
    deviation = (0.02 / (n - 1)) ** 0.5
    assert t_half_width(values) == pytest.approx(t * deviation / n**0.5, rel=1e-5)
    assert t_half_width(values[:1]) is None
    assert t_half_width(values, 0.5) < t_half_width(values)  # type: ignore[operator]
