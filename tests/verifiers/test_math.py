"""Mathematical equality: the library's verdicts, and where they are others."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.verifiers import math_verify
from exgrpo_cli.verifiers.extract import extract_answer
from exgrpo_cli.verifiers.math import check_gold, judge, read, usual
from exgrpo_cli.verifiers.pool import Job, Pool

BENCHMARKS = Path(__file__).parents[2].parent / "shared" / "data" / "math-benchmarks.verl.parquet"


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
    different = [
        (job.answer, job.extracted, verdict.correct)
        for job, verdict, same in zip(jobs, verdicts, expected, strict=True)
        if verdict.correct != same
    ]
    assert sorted(set(different)) == [
        ("(-\\infty, 2)", "x<2", True),
    ]
    assert {v.status for v in verdicts} == {"ok"}
    assert 40 < sum(expected) < 90  # right and wrong ones


@pytest.mark.parametrize("text", [*GOLDS, *ANSWERS])
def test_answers_are_read_as_math_verify_reads_them(text: str) -> None:
    from sympy import srepr

    assert srepr(read(usual(text))[0]) == srepr(parsed(text)[0])


def test_math_verify_itself_stays_as_it_is() -> None:
    from math_verify import grader

    judge("x", "y")  # the library warns once that its time limit is off
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
    assert check_gold("-3./2") is None
    assert check_gold("4.5e33") is None
    assert check_gold(r"\frac{1}{2}") is None
    assert check_gold(r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}") is None


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


RIGHT = [
    # degrees, money, units
    ("90", "90°"), (r"90^\circ", "90"), ("90", "90 degrees"), ("90", r"90^{\circ}"),
    ("5", "€5"), (r"\$5", "5 dollars"), ("5", r"US\$5"), ("18.90", "$18.90"), ("5", "5 euros"),
    ("5", r"5~\text{hours}"), ("5", r"5\ \mathrm{m/s^2}"), ("5", "5 km/h"), ("5", "5 people"),
    ("5", "5 square units"), (r"15\mbox{ cm}^2", "15"), ("5", r"3+2 \text{ cm}"),
    (r"(3, 4)", r"(3\text{ cm}, 4\text{ cm})"), (r"5 \text{ million}", "5,000,000"),
    # wrappers, blanks, ends
    ("5", r"\boldsymbol{5}"), (r"\frac{1}{2}", r"\mathbf{\frac{1}{2}}"), ("5", "**5**"),
    (r"\text{even}", r"\textbf{even}"), ("5", "5."), ("5", "5\\ "), ("5", "~5"), ("5", "= 5"),
    ("5", r"\approx 5"), ("5", r"\text{The answer is }5"), (r"\text{(B)}", "B"),
    ("(1,2)", r"\langle 1,2\rangle"), ("(1,2)", r"\bigl(1,\,2\bigr)"), ("-1,0,1", "$-1$, $0$, $1$"),
    # numbers
    ("58,500", "x=58,500"), ("2220", r"2\,220"), ("1234567", "1 234 567"), ("1234", "1~234"),
    (r"\frac{14}{3}", "4 2/3"), (r"-\frac{14}{3}", "-4 2/3"), (r"\frac{14}{3}", r"4\ \frac{2}{3}"),
    ("12", "١٢"), ("-5", "−5"), ("12", "１２"), (r"\sqrt{15}", "√15"), ("2\\pi", "2π"),
    ("x^2", "x²"), (r"\frac{3}{2}", "1½"),
    ("4.5e33", r"4.5 \times 10^{33}"), ("4.5e33", r"45 \times 10^{32}"), ("4.5e33", "4.5×10³³"),
    ("1.04e-3", "0.00104"), ("1e-7", r"10^{-7}"), ("2.5e-5", r"2.5\cdot 10^{-5}"),
    ("10^{-5}", "10^-5"),
    ("17.5%", "17.5"), (r"8 \%", "0.08"), (r"\frac13", r"0.\overline{3}"), ("-3./2", "-1.5"),
    (r"\frac{1}{2^{99}}", "2^{-99}"), (r"\frac1{2004!}", r"\frac{1}{2004 \cdot 2003!}"),
    (r"6.63\times10^{-34}", "6.63e-34"), (r"\sqrt{2}", "1.41421356"), ("15", "5(3)"),
    ("100000000000000000000000001", "100,000,000,000,000,000,000,000,001"),
    # sets and inequalities
    (r"(-\infty,2)", "x<2"), ("(-1,6)", "-1<x<6"), ("-1<x<6", "(-1,6)"),
    (r"[-2,7]", r"x \in [-2,7]"),
    (r"x \in [-2,7]", r"-2\le x\le 7"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"k \geqslant 2", r"[2,\infty)"), ("(1,3)", "x > 1 and x < 3"), ("(-1,6)", "6 > x > -1"),
    (r"(-\infty,\infty)", r"\text{all real numbers}"), ("(0,1)", "]0,1["), ("x<2", "2>x"),
    # forms
    ("52_8", r"52_{\text{eight}}"), ("52_8", "52 (base 8)"), ("5", "5_{10}"), ("1:3", "2:6"),
    ("2:3:5", "4:6:10"), ("10:30", r"10:30 \text{ a.m.}"), ("16:25", r"\frac{16}{25}"),
    ("1, 2, \\ldots, n", "1,2,3,...,n"), (r"\text{Evelyn}", "evelyn"), ("abc", "cba"),
    ("5", "3+2=5"), ("3.14", r"\pi \approx 3.14"), (r"\pi", r"\pi \approx 3.14"),
    ("E_{1},E_{2}", "E_2, E_1"), ("7", r"7 \text{(mod 10)}"), ("2", r"x \in \{2\}"),
    (r"12000\pi", r"12,000\pi"),
    (r"m_{\max }=n^{2}", "n^2"), ("12", "12 yen"), ("12", "12元"), ("12", "12 eV"),
    ("5", r"\textcolor{red}{5}"), ("5", r"\color{red}{5}"), ("5", r"\large 5"),
    ("5", r"\Rightarrow 5"), (r"(5,\infty)", r"\{x \mid x>5\}"), (r"\{x : x>5\}", r"(5,\infty)"),
    (r"\{x\in\mathbb{R} \mid x>5\}", "x>5"), ("3+4i", r"3+4\mathrm{i}"), ("1024", "2**10"),
    ("0", r"\sin 0"), ("0", r"a \cdot 0"), (r"2\pi i", r"2\pi\mathrm{i}"),
    (r"5\sqrt{2}", "5 * sqrt(2)"),
    (r"v_{\text{max}}", r"v_\mathrm{max}"),
]  # fmt: skip
WRONG = [
    # numbers that differ by more than their own precision
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), (r"\frac1{2004!}", r"\frac{1}{2003!}"),
    (r"\frac1{20040!}", r"\frac{1}{20041!}"), (r"6.63\times10^{-34}", r"1.0\times10^{-34}"),
    (r"6.63\times10^{-34}", "6.64e-34"), ("4.5e33", "4.6e33"), (".0000672", "0.000067"),
    ("0", "0.0000001"), (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"), ("1/3", "0.33"),
    (r"(1, \frac{1}{2^{99}})", r"(1,\frac{1}{2^{90}})"), (r"\pi", "3.14"),
    ("100000000000000000000000001", "100000000000000000000000002"),
    # relations
    ("204", r"\neq 204"), ("204", "> 204"), ("204", r"\ge 204"), ("204", "x > 204"),
    ("204", "1000003 = 204"), ("204", r"1000003 \approx 204"), ("(-1,6)", r"-1<x\le 6"),
    ("5", "x < 5"),
    ("(-1,6)", "-1<x<7"), ("x=5", "y=5"), ("204", "204 or 205"),
    # bases, times, dates, ratios, words, sequences
    ("204", "204_7"), ("204_5", "204_7"), ("52_8", "52_9"), ("52_8", "53_8"),
    ("204", "204 (base 7)"),
    ("10:30", "1:3"), ("1:3", "10:30"), ("10:30", r"\frac13"), ("10:30 am", "10:30 pm"),
    ("2:3:5", "2:15"), ("2008", "2024-01-15"), ("2024-01-15", "2008"), ("2024-01-15", "2024-01-16"),
    ("listen", "silent"), (r"\text{listen}", "silent"), ("listen", r"\text{silent}"),
    (r"\text{even}", "not even"), ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"),
    ("1, 2, \\ldots, 9", "1, 9"),
    # what is no answer
    ("5", "5/"), ("5", "5--"), ("5", "5^"), ("5", "5+"), ("5", "5_"), ("5", "(5"), ("5", "5}"),
    ("5", "5 5"), ("10", "5 5"), ("5", "not 5"), ("0", "not 0"),
    ("0", r"\text{not }0"), ("0", "never 0.0"), ("5", "5 is wrong"), ("8", "5(3)"), ("5", "}{"),
    (r"\frac{2}{3}", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"), ("5", "5 mod 7"),
    ("5", "approximately"),
    ("5", "5 squared"),
    ("5", "5 thirds"), ("5", "5 thousandths"), (r"(5,\infty)", r"\{x \mid x \ge 5\}"),
    (r"(5,\infty)", r"\{x \in \mathbb{Z} \mid x > 5\}"), ("5", r"\{x \mid x>5\}"),
    ("2", "2 + 3"),
    (r"5 \text{ million}", "5"), ("5", "5 million"), (r"v_{\text{max}}", r"v_{\text{min}}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right(gold: str, answer: str) -> None:
    assert judge(gold, answer).correct


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong(gold: str, answer: str) -> None:
    assert not judge(gold, answer).correct


def test_the_library_alone_is_untouched() -> None:
    for gold, answer in [
        ("5", "€5"),
        ("204", "> 204"),
        ("52_8", "52_9"),
        ("x+1", "1+x"),
        ("2", "3"),
    ]:
        assert math_verify.judge(gold, answer).correct == plain(gold, answer)
    assert (
        math_verify.judge("204", "> 204", explain=True).parsed_answer == "204 (Integer); 204 (str)"
    )
    assert math_verify.judge("", "1").status == "unparsable"
    assert math_verify.check_gold("") is not None
    assert math_verify.check_gold("5") is None


def test_the_library_looks_for_the_answer_in_a_whole_text() -> None:
    from math_verify import parse, verify

    for text in ("Hence x equals $12$.", "So \\boxed{12} or not.", "Nothing.", "It is $13$."):
        expected = bool(verify(parse("$12$"), parse(text)))
        for verifier in (judge, math_verify.judge):
            verdict = verifier("12", text, whole=True)
            assert (verdict.status, verdict.correct) == ("ok", expected)
    assert judge("12", "Hence x equals $12$.", whole=True).correct
    assert not judge("12", "Hence x equals $12$.").correct


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
        wrong = verdict.status == "ok" and not verdict.correct
        if wrong and plain(job.answer, job.extracted or ""):
            different.append((job.answer, job.extracted))
    assert not different
    assert late <= 0.01 * len(jobs)
    itself = [v for v in verdicts[::4] if v.status == "ok"]
    assert all(v.correct for v in itself)
    assert len(itself) > 0.95 * len(golds)
    assert 0.4 * len(jobs) < sum(v.correct for v in verdicts) < 0.9 * len(jobs)
