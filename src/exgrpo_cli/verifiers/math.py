"""Mathematical equality, by math-verify. Runs in a worker: nothing here limits time or memory.

math-verify's own limits are signal timers of the main thread, which a long operation on big
integers never sees; they are switched off, and the pool kills the worker instead.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from exgrpo_cli.verifiers import Verdict
from exgrpo_cli.verifiers.extract import last_boxed, strip_answer

_ARITHMETIC = re.compile(r"[-+*/^()\d.,\s]+")


def parse_math(text: str) -> list[Any]:
    r"""math-verify's reading of an answer: expressions, and the normalised text last.

    The answer is read as ``\boxed{answer}``, with math-verify's defaults (LaTeX and plain
    expressions). Where that gives no expression and the answer is plain arithmetic, such as
    ``-3./2``, it is read without the box.

    Returns:
        Empty when nothing can be read; only a string when no expression can be.
    """
    inner = last_boxed(text) or strip_answer(text)
    if not inner:
        return []
    parsed: list[Any] = parse(f"\\boxed{{{inner}}}", parsing_timeout=None)
    # Only arithmetic: in other text, math-verify would pick out any number.
    if all(isinstance(item, str) for item in parsed) and _ARITHMETIC.fullmatch(inner):
        parsed = parse(inner, parsing_timeout=None) or parsed
    return parsed


# A question's K samples share their gold answer, and many questions share wrong ones.
_parse_short = lru_cache(maxsize=4096)(parse_math)


def _parse_once(text: str) -> list[Any]:
    return _parse_short(text) if len(text) <= 1000 else parse_math(text)


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether ``extracted`` equals the gold ``answer`` (math-verify is asymmetric: gold first).

    Returns:
        Status ``unparsable`` when the gold cannot be read at all, else ``ok``. A gold that is only
        text to math-verify is compared as text. Equal texts are equal without a comparison: after
        the expressions, math-verify compares the normalised texts.
    """
    gold = _parse_once(answer)
    if not gold:
        return Verdict("unparsable", why="math-verify cannot read the gold answer")
    if answer.strip() == extracted.strip():
        found = gold
        correct = any(isinstance(item, str) and item.strip() for item in gold)
    else:
        found = _parse_once(extracted)
        correct = bool(found) and bool(verify(gold, found, timeout_seconds=None))
    if not found:
        why = "math-verify cannot read the answer"
    else:
        why = "equal to the gold answer" if correct else "not equal to the gold answer"
    return Verdict(
        "ok",
        reward=float(correct),
        correct=correct,
        why=why,
        parsed_answer=show(gold) if explain else None,
        parsed_extracted=show(found) if explain else None,
    )


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    gold = parse_math(answer)
    if not gold:
        return "math-verify cannot read it"
    if all(isinstance(item, str) for item in gold):
        return "math-verify reads no expression in it, so it is compared as text"
    return None


def show(parsed: list[Any]) -> str:
    """A parse for people, such as ``1/2 (Rational)``; at most 500 characters."""
    return "; ".join(f"{item} ({type(item).__name__})" for item in parsed[:4])[:500]
