"""Numbers with a relative tolerance."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from exgrpo_cli.verifiers import Verdict, judged
from exgrpo_cli.verifiers.extract import last_boxed, strip_answer
from exgrpo_cli.verifiers.normalise import normalise
from exgrpo_cli.verifiers.sure import number as written

TOLERANCE = 1e-6
"""Relative to the larger of the two magnitudes; zero equals only zero."""

_LONGEST = 500
"""Characters."""

_ASSIGNED = re.compile(r"[^=]*?[A-Za-z][^=]*=(.*)", re.DOTALL)
_PERCENT = re.compile(r"(.*?)\s*\\?(?:%|percent|\\text\s*\{\s*percent\s*\})", re.DOTALL)
_SIGN = re.compile(r"^([-+])\s+")
_SPACED = re.compile(r"(?<=[0-9]) (?=[0-9])")
_QUOTIENT = re.compile(r"([^/{}]+)/([^/{}]+)")
_FRACTION = re.compile(
    r"([-+]?)([0-9]{0,100})\s?\\[dt]?frac(?:\{([^{}]*)\}|\s?([0-9]))(?:\{([^{}]*)\}|\s?([0-9]))"
)


def number(text: str) -> float | None:
    r"""An answer as a number; None when it is none or not finite.

    Understood are numbers as people write them (:mod:`exgrpo_cli.verifiers.normalise`), with their
    units: ``1,234.5``, ``-3/4``, ``\frac12``, ``1\frac{1}{2}``, ``1.2e-5``, ``10^{-5}``,
    ``x = 12``, ``12\text{ cm}``, ``$12``; and ``12%``, which is 0.12.
    """
    value = exact(text)
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def exact(text: str) -> Fraction | None:
    """:func:`number`, as it was written."""
    text = normalise(last_boxed(text) or strip_answer(text))
    if len(text) > _LONGEST:
        return None
    assigned = _ASSIGNED.fullmatch(text)
    if assigned:
        text = normalise(assigned[1])
    percent = _PERCENT.fullmatch(text)
    if percent:
        text = percent[1].rstrip("\\ ")
    if text[:1] + text[-1:] in ("{}", "()"):
        text = text[1:-1]
    value = _value(_SPACED.sub("", _SIGN.sub(r"\1", text.strip())))
    return value / 100 if percent and value is not None else value


def _value(text: str) -> Fraction | None:
    plain = written(text)
    if plain is not None:
        return plain.value
    if match := _FRACTION.fullmatch(text):
        sign, whole = match[1], match[2]
        above, below = written(match[3] or match[4] or ""), written(match[5] or match[6] or "")
    elif match := _QUOTIENT.fullmatch(text):
        sign, whole = "", ""
        above, below = written(match[1].strip()), written(match[2].strip())
    else:
        return None
    if above is None or below is None or not below.value:
        return None
    value = int(whole or 0) + above.value / below.value
    return -value if sign == "-" else value


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether the numbers are equal to :data:`TOLERANCE`; ``unparsable`` for a gold that is none.

    Integers are not rounded: from an integer an answer differs by no more than the tolerance
    itself.
    """
    exactly = exact(answer)
    gold = number(answer)
    if exactly is None or gold is None:
        return Verdict("unparsable", why="the gold answer is no number")
    found = number(extracted)
    correct = found is not None and math.isclose(gold, found, rel_tol=TOLERANCE)
    if correct and re.fullmatch(r"[-+]?[0-9,]+", normalise(answer)):
        correct = abs(exactly - (exact(extracted) or 0)) <= TOLERANCE
    if found is None:
        why = "the answer is no number"
    else:
        why = f"{found!r} {'equals' if correct else 'is not'} {gold!r}"
    if not explain:
        return judged(correct, why)
    return judged(correct, why, repr(gold), None if found is None else repr(found))


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if number(answer) is not None else "it is no number"
