"""reasoning-gym's scorers as a verifier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sympy

from exgrpo_cli.verifiers.pool import Job, Pool
from exgrpo_cli.verifiers.reasoning_gym import evaluate


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, timeout=60) as opened:
        yield opened


def job(kind: str, gold: str, answer: str, **metadata: object) -> Job:
    told = {"source_dataset": kind, **metadata}
    return Job("reasoning_gym", gold, answer, metadata=told)


def test_only_the_full_score_is_a_reward(pool: Pool) -> None:
    answers = ["5", "5.0", "15", "the answer is 5", "", "6"]
    verdicts = pool.judge([job("chain_sum", "5", answer) for answer in answers])
    part = pool.explain(job("chain_sum", "5", "15"))
    assert [verdict.reward for verdict in verdicts] == [1, 1, 0, 0, 0, 0]
    assert [verdict.correct for verdict in verdicts] == [True, True, *[False] * 4]
    assert part.why == "the scorer gives 0.5 of 1"
    assert (part.parsed_answer, part.parsed_extracted) == ("5", "15")


@pytest.mark.parametrize(
    ("told", "status", "why"),
    [
        ({"source_dataset": "prime_factorization"}, "ok", "the scorer cannot read it: ValueError"),
        ({"source_dataset": "no_such"}, "unparsable", "reasoning-gym has no kind 'no_such'"),
        ({"source_dataset": "os.system"}, "unparsable", "no kind 'os.system'"),
        ({"source_dataset": "gcd", "config": {"min_value": -3}}, "unparsable", "cannot be opened"),
        ({}, "unparsable", "names no kind"),
    ],
)
def test_what_cannot_be_judged(pool: Pool, told: dict[str, object], status: str, why: str) -> None:
    (verdict,) = pool.judge([Job("reasoning_gym", "2 × 3", "zwei", metadata=told)])
    assert (verdict.status, verdict.reward) == (status, 0)
    assert why in verdict.why


def test_a_gold_that_its_scorer_cannot_read_is_said(pool: Pool) -> None:
    (verdict,) = pool.judge([job("prime_factorization", "drei", "zwei")])
    assert verdict.status == "unparsable"
    assert verdict.why.startswith("ValueError: ")


def test_neither_answers_nor_metadata_are_run(pool: Pool, tmp_path: Path) -> None:
    """Scorers of these kinds evaluate them as Python."""
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    called = f"sympify({code!r})"
    numbers = {"numbers": [1, 2], "target": 3}
    jobs = [
        job(kind, "3", answer, **metadata)
        for answer in (code, called, f"[{code}]", f"lambdify('x', {code!r})", f"exec({code!r})")
        for kind, metadata in {
            "n_queens": {"valid_answers": ["3"]},
            "string_insertion": {},
            "spiral_matrix": {},
            "binary_matrix": {},
            "countdown": numbers,
            "puzzle24": numbers,
            "polynomial_multiplication": {"variables": ["x"]},
            "simple_integration": {"variable": "x", "integrand": "3"},
        }.items()
    ]
    jobs.append(job("bitwise_arithmetic", "0x3", "0x3", problem=code))
    jobs.append(job("number_sorting", code, "[1]", direction="ascending"))
    verdicts = pool.judge(jobs)
    assert not trace.exists()
    assert not any(verdict.correct for verdict in verdicts)


def test_an_answer_that_takes_for_ever_stops_only_itself() -> None:
    numbers = {"numbers": [1, 2], "target": 3}
    answers = ["1+2", "9**9**9**9", "2+1"]
    with Pool(1, timeout=2) as pool:
        pool.judge([job("countdown", "1 + 2", "2 + 1", **numbers)])
        verdicts = pool.judge([job("countdown", "1 + 2", answer, **numbers) for answer in answers])
    assert [verdict.correct for verdict in verdicts] == [True, False, True]


@pytest.mark.parametrize(
    ("source", "names", "value"),
    [
        ("[[1, 'Q'], (2,)]", None, [[1, "Q"], (2,)]),
        (" (0x1f << 2) - -3 ", None, 127),
        ("Integer(3) + sqrt(Integer(4))", vars(sympy), 5),
        ("sin(Symbol('x'))", vars(sympy), sympy.sin(sympy.Symbol("x"))),
        ("pi", vars(sympy), sympy.pi),
    ],
)
def test_what_is_evaluated(source: str, names: dict | None, value: object) -> None:
    assert evaluate(source, names) == value


@pytest.mark.parametrize(
    "source",
    [
        "open('x')", "Integer(3).__class__", "sympify('1')", "[x for x in (1,)]", "(lambda: 1)()",
        "Symbol.x", "f'{1}'", "undefined", "x if x else 1", "print", "Integer(3)(4)",
    ],
)  # fmt: skip
def test_what_is_not_evaluated(source: str) -> None:
    with pytest.raises(ValueError, match="not evaluated"):
        evaluate(source, vars(sympy) | {"open": open, "print": print})
