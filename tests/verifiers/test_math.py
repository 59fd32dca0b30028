"""Mathematical equality, multiple choice, exact text and numbers."""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.verifiers import Verdict, choice, exact, numeric
from exgrpo_cli.verifiers.extract import extract_answer
from exgrpo_cli.verifiers.math import check_gold, judge, parse_math
from exgrpo_cli.verifiers.pool import Job, Pool

BENCHMARKS = Path(__file__).parents[2].parent / "shared" / "data" / "math-benchmarks.verl.parquet"


# Without LaTeX, such as -3./2, which is read without the box.
ARITHMETIC = re.compile(r"[-+*/^()\d.,\s]+")


@cache
def parsed(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}")


def plain(gold: str, answer: str) -> bool:
    """math-verify as its users call it."""
    from math_verify import verify

    return bool(verify(parsed(gold), parsed(answer)))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, timeout=20) as pool:
        yield pool


GOLDS = [
    "42", "-7", "1/2", r"\frac{3}{4}", r"\sqrt{2}", r"2\sqrt{3}", "0.5", "3.14", "10^6", "1,234",
    r"\pi", r"\frac{\pi}{2}", "2n+1", "x^2-1", r"\{1,2,3\}", "(3, 4)", "[0, 1]", r"(-\infty, 2)",
    "x=5", r"50\%", r"\text{even}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"120^\circ",
    "1+i", r"\binom{5}{2}",
]  # fmt: skip
ANSWERS = [
    "42.0", "-7", "0.5", r"\dfrac{3}{4}", r"\sqrt 2", r"\sqrt{12}", "1/2", r"\frac{157}{50}",
    "1000000", "1234", "3.14159", r"\pi/2", "1+2n", "(x-1)(x+1)", r"\{3,2,1\}", "(3,4)", "[0,1]",
    r"x<2", "5", "0.5", "even", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", "120", "i+1", "10",
]  # fmt: skip


def responses() -> list[tuple[str, str]]:
    """100 gold answers with responses: equal ones, others' and wrappings."""
    pairs = []
    for index, (gold, answer) in enumerate(zip(GOLDS, ANSWERS, strict=True)):
        other = ANSWERS[(index + 1) % len(ANSWERS)]
        pairs += [
            (gold, f"<think>Let me see.</think>\nWe get \\boxed{{{answer}}}."),
            (gold, f"Hence the final answer is ${gold}$. I hope it is correct."),
            (gold, f"Therefore \\[ \\boxed{{{other}}} \\]"),
            (answer, f"So <answer>{gold}</answer>"),
        ]
    return pairs


def test_verdicts_are_those_of_plain_math_verify(pool: Pool) -> None:
    pairs = responses()
    assert len(pairs) == 100
    jobs = [Job("math", gold, extract_answer(text)) for gold, text in pairs]
    verdicts = pool.judge(jobs)
    expected = [plain(job.answer, job.extracted or "") for job in jobs]
    assert [v.correct for v in verdicts] == expected
    assert {v.status for v in verdicts} == {"ok"}
    assert 40 < sum(expected) < 90  # right and wrong ones


READ_IN_ITS_OWN_WAY = [
    "s^{2}+b s+1", r"\frac{1}{4p^3}", "g(x)=x^2-2x+2",  # what the first stage does not parse
    r"\frac{1}{3} E_{1}", "x=y=2+1", "1, 2, and 3", "a=1;b=2", r"\pm 5", r"m_{\max}", "$1$,$2$",
    "the answer: 5", r"\text{Answer } 7", "12 cm", r"33\frac{1}{3}\%", "1/2/3", "nan", "9" * 5000,
    "}{", r"\begin{cases} x \\ y", "x ∈ [-2,7]",
    "i", "3+4i", "(1,2)", "(1, 2]", r"\emptyset", "", "$$",
]  # fmt: skip


@pytest.mark.parametrize("text", [*GOLDS, *ANSWERS, *READ_IN_ITS_OWN_WAY])
def test_answers_are_read_as_math_verify_reads_them(text: str) -> None:
    from sympy import Basic, srepr

    def shown(items: list[Any]) -> list[str]:
        return [srepr(item) if isinstance(item, Basic) else str(item) for item in items]

    assert shown(parse_math(text)) == shown(parsed(text) if text else [])


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\dfrac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
        (r"\text{even}", r"\mathrm{even}"),
        ("15\\mbox{ cm}^2", "15"),
        (r"m_{\max}=n", r"$m_{\max}=n$"),
        ("1/0", "$1/0$"),
        ("9" * 5000, f"${'9' * 5000}$"),
        ("answer", "$answer$"),
        ("}{", "$}{$"),
    ],
)
def test_equal_normalised_texts(gold: str, answer: str) -> None:
    assert judge(gold, answer).correct == plain(gold, answer)


def test_math_verify_itself_stays_as_it_is() -> None:
    from math_verify import grader

    before = dict(vars(grader))
    assert not judge("x^2 = y", "x^2 = 3y").correct
    assert not judge(r"\sqrt{2} x", r"\sqrt{3} x").correct
    assert vars(grader) == before


def test_gold_comes_first() -> None:
    # math-verify is asymmetric: an assignment matches a bare value only as the gold
    one, other = judge("x=5", "5").correct, judge("5", "x=5").correct
    assert (one, other) == (plain("x=5", "5"), plain("5", "x=5"))
    assert judge("(1,2)", r"\{1,2\}").correct == plain("(1,2)", r"\{1,2\}")


def test_gold_in_dollars_or_a_box_is_understood() -> None:
    assert judge(r"$\frac{1}{2n+2}$", r"\frac{1}{2(n+1)}").correct
    assert judge(r"\boxed{5}", "5").correct
    assert judge("-3./2", "-1.5").correct  # no LaTeX, but a plain expression


def test_an_unparsable_gold_is_never_correct() -> None:
    for gold in ("", "  ", "$$"):
        verdict = judge(gold, gold or "1")
        assert (verdict.status, verdict.correct, verdict.reward) == ("unparsable", False, 0.0)
    assert check_gold("") is not None
    assert check_gold("np.arcsin(10/13)") is not None
    # math-verify takes the last fraction out of what it cannot read
    assert "a part of it: 2/3" in str(check_gold(r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"))
    assert check_gold("-3./2") is None
    assert check_gold(r"\frac{1}{2}") is None


def test_an_unparsable_answer_is_wrong() -> None:
    verdict = judge("5", "}{")
    assert (verdict.status, verdict.correct) == ("ok", False)


def test_explain_says_how_answers_were_read() -> None:
    verdict = judge("50/100", r"\frac{1}{2}", explain=True)
    assert verdict.correct
    assert verdict.parsed_answer is not None
    assert "1/2" in verdict.parsed_answer
    assert verdict.parsed_extracted is not None
    assert "1/2" in verdict.parsed_extracted


def rewritten(gold: str) -> list[str]:
    """The gold answer in other spellings, most of them equal to it."""
    bare = gold.strip().strip("$").strip()
    return [
        bare,
        f"${bare}$",
        bare.replace("\\frac", "\\dfrac"),
        bare.replace(" ", ""),
        f"\\text{{{bare}}}" if bare.isalpha() else f"{{{bare}}}",
        f"{bare}.0" if bare.isdigit() else f"x = {bare}",
    ]


@pytest.mark.skipif(not BENCHMARKS.exists(), reason="no benchmark data here")
def test_real_golds_against_themselves_and_others(pool: Pool) -> None:
    """Every 25th gold answer; all of them, for some minutes, with EXGRPO_ALL_ANSWERS=1."""
    import polars as pl

    rows = pl.read_parquet(BENCHMARKS)["reward_model"].struct.field("ground_truth").unique()
    golds = sorted(rows.to_list())[:: 1 if os.environ.get("EXGRPO_ALL_ANSWERS") else 25]
    jobs = []
    for index, gold in enumerate(golds):
        other = golds[(index + 1) % len(golds)]
        texts = [f"\\boxed{{{gold}}}", f"<think>Hm, \\boxed{{0}}</think>\n$$\\boxed{{{other}}}$$"]
        spelled = rewritten(gold)
        texts += [
            f"The answer is \\boxed{{{spelled[(index + k) % len(spelled)]}}}." for k in (0, 1)
        ]
        jobs += [Job("math", gold, extract_answer(text)) for text in texts]
    verdicts = pool.judge(jobs)
    different, late = [], 0
    for job, verdict in zip(jobs, verdicts, strict=True):
        late += verdict.status in ("timeout", "error")
        if verdict.status == "ok" and verdict.correct != plain(job.answer, job.extracted or ""):
            different.append((job.answer, job.extracted))
    assert not [pair for pair in different if not ARITHMETIC.fullmatch(pair[0])]
    assert late <= 0.01 * len(jobs)
    itself = [v for v in verdicts[::4] if v.status == "ok"]
    assert all(v.correct for v in itself)
    assert len(itself) > 0.95 * len(golds)
    assert 0.4 * len(jobs) < sum(v.correct for v in verdicts) < 0.9 * len(jobs)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("[B]", "B"), ("B.", "B"), ("B)", "B"),
        ("B) 12 m", "B"), ("(B) 12 m", "B"), ("B. Because it is so", "B"), ("B: text", "B"),
        (r"\text{B}", "B"), (r"\textbf{(B)}", "B"), (r"$\mathrm{B}$", "B"), ("**B**", "B"),
        ("Option B", "B"), ("J", "J"), (r"\text{(B)}\ 12", "B"),
        ("K", None), ("AB", None), ("A man walks", None), ("12", None), ("", None),
        ("B and C", None),
    ],
)  # fmt: skip
def test_choice_letters(text: str, letter: str | None) -> None:
    assert choice.letter(text) == letter


def test_choice_verdicts() -> None:
    assert choice.judge("B", r"\text{(B)}").correct
    assert not choice.judge("(B)", "C").correct
    assert choice.judge("B", "12") == Verdict("ok", why="no letter, not B")
    assert choice.judge("12", "B").status == "unparsable"


def test_exact_text() -> None:
    assert exact.judge("New  York\n", " New York").correct
    assert not exact.judge("New York", "new york").correct
    assert exact.judge(" ", "x").status == "unparsable"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42.0), ("-1,234.5", -1234.5), ("1{,}000", 1000.0), (r"1\,000", 1000.0),
        ("$12", 12.0),
        (r"\$12.50", 12.5), ("12%", 0.12), (r"12\%", 0.12), ("3/4", 0.75), ("-3/4", -0.75),
        (r"\frac{3}{4}", 0.75), (r"-\dfrac{3}{4}", -0.75), ("1.2e-5", 1.2e-5),
        (r"1.2 \times 10^{-5}", 1.2e-5), (r"$3 \cdot 10^4$", 3e4), (".5", 0.5), ("5.", 5.0),
        ("−5", -5.0),
        ("", None), ("x", None), ("1/0", None), ("1e9999", None), ("nan", None), ("inf", None),
        ("1,23", None), ("12 34", 1234.0), (r"\frac{a}{b}", None),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float | None) -> None:
    assert numeric.number(text) == (pytest.approx(value) if value is not None else None)


def test_numeric_tolerance() -> None:
    assert numeric.judge("1000000", "1000000.9").correct
    assert not numeric.judge("1000000", "1000002").correct
    assert numeric.judge("0.5", "50%").correct
    assert not numeric.judge("0", "1e-9").correct
    assert not numeric.judge("1", "one").correct
    assert numeric.judge("one", "1").status == "unparsable"
