"""The library math-verify alone, with its defaults, for comparison. Runs in a worker."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from exgrpo_cli.verifiers import Verdict, judged
from exgrpo_cli.verifiers.extract import last_boxed, strip_answer


def _inner(text: str) -> str:
    return last_boxed(text) or strip_answer(text)


def judge(answer: str, extracted: str, explain: bool = False, whole: bool = False) -> Verdict:
    r"""math-verify's verdict.

    Args:
        answer: the gold; read as ``\boxed{gold}``.
        extracted: likewise; with ``whole`` a running text, in which math-verify looks for the
            answer, and the gold is read as ``$gold$`` (the public ExGRPO implementation's reward).

    Returns:
        Status ``unparsable`` when math-verify reads nothing in the gold.
    """
    if whole:
        gold = parse(f"${answer.strip()}$", parsing_timeout=None)
        found = parse(extracted, parsing_timeout=None)
    else:
        gold = parse(f"\\boxed{{{_inner(answer)}}}", parsing_timeout=None)
        found = parse(f"\\boxed{{{_inner(extracted)}}}", parsing_timeout=None)
    if not any(str(item).strip() for item in gold):
        return Verdict("unparsable", why="math-verify cannot read the gold answer")
    correct = bool(found) and bool(verify(gold, found, timeout_seconds=None))
    why = "equal to the gold answer" if correct else "not equal to the gold answer"
    return judged(correct, why, show(gold), show(found)) if explain else judged(correct, why)


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    gold = parse(f"\\boxed{{{_inner(answer)}}}", parsing_timeout=None)
    if not gold:
        return "math-verify cannot read it"
    if all(isinstance(item, str) for item in gold):
        return "math-verify reads no expression in it, so it is compared as text"
    return None


def show(parsed: list[Any]) -> str:
    """A parse for people, such as ``1/2 (Rational)``; at most 500 characters."""
    return "; ".join(f"{item} ({type(item).__name__})" for item in parsed[:4])[:500]
