"""Multiple choice and exact text."""

import pytest

from exgrpo_cli.verifiers import Verdict, choice, exact


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("[B]", "B"), ("B.", "B"), ("B)", "B"),
        ("B) 12 m", "B"), ("(B) 12 m", "B"), ("B. Because it is so", "B"), ("B: text", "B"),
        (r"\text{B}", "B"), (r"\textbf{(B)}", "B"), (r"$\mathrm{B}$", "B"), ("**B**", "B"),
        (r"\boldsymbol{B}", "B"), (r"\mathbf{(D)}~5", "D"), (r"\textbf{\text{B}}", "B"),
        ("Option B", "B"), ("J", "J"), (r"\text{(B)}\ 12", "B"), ("B - 12", "B"), ("B (12)", "B"),
        ("Answer: B", "B"), (r"\boxed{B}", "B"), ("The answer is (B).", "B"), ("B = 12", "B"),
        ("The answer is C because it is so", "C"), ("The correct option is C.", "C"),
        ("The correct answer is option D", "D"), ("A is right", "A"), ("B, because", "B"),
        ("Ｃ", "C"), ("（B）", "B"), ("E: None of the above", "E"),
        ("Ans: D", "D"), ("Ans. D", "D"), ('"D"', "D"), ("'D'", "D"), ("“D”", "D"), ("[[D]]", "D"),
        ("Thus, D", "D"), ("Therefore D.", "D"), ("D)12", "D"), ("(D)12", "D"), ("D。", "D"),
        ("选D", "D"), ("选项D", "D"), ("D选项", "D"), ("正确答案是 D", "D"), ("【D】", "D"),
        ("Ｄ．", "D"),
        # the option's text names others
        ("D. A and B", "D"), ("(D) A or B", "D"), ("(D) A, B, and C", "D"),
        # refuted, or one of several that are discussed
        ("A is wrong", None), ("A is not correct", None), ("B is clearly incorrect", None),
        ("A (incorrect)", None), ("A = 12, B = 13", None), ("D) 12 or C) 13", None),
        ("A because B is wrong", "A"), ("D (not C)", "D"), ("so", None),
        ("K", None), ("A man walks", None), ("12", None), ("", None), ("bad", None),
        ("neither B nor C", None), ("B, not C", None), ("(B) and also C", None),
        # several
        ("AB", "AB"), ("CA", "AC"), ("A, C", "AC"), ("A and C", "AC"), ("(A), (C)", "AC"),
        ("B and C", "BC"), ("B, C", "BC"), ("(B) or (C)", "BC"), ("A, C, and D", "ACD"),
    ],
)  # fmt: skip
def test_letters(text: str, letters: str | None) -> None:
    assert choice.letters(text) == letters


def test_verdicts() -> None:
    assert choice.judge("B", r"\text{(B)}").correct
    assert not choice.judge("(B)", "C").correct
    assert choice.judge("B", "12") == Verdict("ok", why="no letter, not B")
    assert choice.judge("12", "B").status == "unparsable"


def test_several_letters_are_right_only_where_the_gold_has_them() -> None:
    for answer in ("A, C", "A and C", "CA", "(A) and (C)"):
        assert choice.judge("AC", answer).correct
        assert not choice.judge("A", answer).correct
    assert not choice.judge("AC", "A").correct
    assert not choice.judge("AC", "A, B, C").correct
    for answer in ("B, C", "(B) or (C)", "B and C"):
        assert not choice.judge("B", answer).correct


def test_exact_text() -> None:
    assert exact.judge("New  York\n", " New York").correct
    assert not exact.judge("New York", "new york").correct
    assert exact.judge(" ", "x").status == "unparsable"
