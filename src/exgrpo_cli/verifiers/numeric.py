"""Numbers with a relative tolerance."""

from __future__ import annotations

import math
import re

from exgrpo_cli.verifiers import Verdict

TOLERANCE = 1e-6
"""Relative to the larger of the two magnitudes; zero equals only zero."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?"
_PLAIN = re.compile(_NUMBER)
_FRACTION = re.compile(rf"({_NUMBER})/({_NUMBER})")
_LATEX_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_POWER_OF_TEN = re.compile(rf"({_NUMBER})(?:\\times|\\cdot|[*×·])10\^\{{?([+-]?\d{{1,4}})\}}?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!,)(?=\d{3}(?!\d))")


def number(text: str) -> float | None:
    r"""An answer as a number; None when it is none or not finite.

    Understood are ``1,234.5``, ``-3/4``, ``\frac{3}{4}``, ``1.2e-5``, ``1.2 \times 10^{-5}``, a
    leading currency sign, and ``12%`` or ``12\%``, which is 0.12.
    """
    text = _THOUSANDS.sub("", text.strip().strip("$").strip())
    text = re.sub(r"\s|\\[,!;:]|\\(?:left|right)(?![a-z])", "", text).replace("−", "-")
    text = re.sub(r"^([+-]?)(?:\\\$|[$€£¥])", r"\1", text).rstrip(".") or text
    percent = re.fullmatch(r"(.*?)\\?%", text, re.DOTALL)
    if percent:
        text = percent[1]
    try:
        value = _value(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    if value is None or not math.isfinite(value):
        return None
    return value / 100 if percent else value


def _value(text: str) -> float | None:
    if _PLAIN.fullmatch(text):
        return float(text)
    if match := _FRACTION.fullmatch(text):
        return float(match[1]) / float(match[2])
    if match := _LATEX_FRACTION.fullmatch(text):
        return float(f"{match[1]}1") * float(match[2]) / float(match[3])
    if match := _POWER_OF_TEN.fullmatch(text):
        return float(match[1]) * 10.0 ** int(match[2])
    return None


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether the numbers are equal to :data:`TOLERANCE`; ``unparsable`` for a gold that is none.

    Returns:
        Reward 1 or 0.
    """
    gold = number(answer)
    if gold is None:
        return Verdict("unparsable", why="the gold answer is no number")
    found = number(extracted)
    correct = found is not None and math.isclose(gold, found, rel_tol=TOLERANCE)
    if found is None:
        why = "the answer is no number"
    else:
        why = f"{found!r} {'equals' if correct else 'is not'} {gold!r}"
    return Verdict(
        "ok",
        reward=float(correct),
        correct=correct,
        why=why,
        parsed_answer=repr(gold) if explain else None,
        parsed_extracted=repr(found) if explain and found is not None else None,
    )


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if number(answer) is not None else "it is no number"
