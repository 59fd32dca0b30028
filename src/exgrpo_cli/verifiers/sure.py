r"""Plain numbers, which are compared exactly and without math-verify.

``tests/verifiers/test_sure.py`` holds what is said about them against math-verify itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 500
"""Characters. Longer numbers are left to math-verify."""
# "1 000", "5%", "1,00" and what else people write are made one of these by `normalise`.
_NUMBER = re.compile(
    r"(?P<dollar>\$?)(?P<sign>[-+]?)"
    r"(?:(?P<digits>(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:\s?\\times 10\^\{(?P<power>-?\d{1,4})\})?"
    r"|10\^(?:\{(?P<ten>-?\d{1,4})\}|(?P<tenth>\d))"
    r"|(?P<over>\d+)/(?P<under>[1-9]\d*)"
    r"|(?P<whole>\d*)\s?\\[dt]?frac\{(?P<above>\d+)\}\{(?P<below>[1-9]\d*)\}"
    r")(?P=dollar)",
    re.ASCII,
)
_ROUNDED = Fraction(1, 10**5)
"""math-verify rounds decimals to six places before it compares them."""
_RELATIVE = Fraction(1, 10**6)


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    half: Fraction | None = None
    """Half a unit of the last digit of a decimal, which is as precise as it is; None for an exact
    number."""
    scientific: bool = False


def number(text: str) -> Number | None:
    r"""The value of ``12``, ``-1,200``, ``0.75``, ``3/4``, ``1\frac{3}{4}``, ``6.63 \times
    10^{-34}``, perhaps in ``$``; None for anything else."""
    if len(text) > _LONGEST:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["digits"] is not None:
        digits = match["digits"].replace(",", "").rstrip(".")
        places = len(digits.partition(".")[2])
        unit = Fraction(10) ** int(match["power"] or 0)
        half = unit / (2 * 10**places) if places else None
        return Number(sign * Fraction(digits) * unit, half, match["power"] is not None)
    ten = match["ten"] or match["tenth"]
    if ten is not None:
        return Number(sign * Fraction(10) ** int(ten))
    above, below = match["over"] or match["above"], match["under"] or match["below"]
    return Number(sign * (int(match["whole"] or 0) + Fraction(int(above), int(below))))


def as_precise(gold: Fraction, found: Fraction, half: Fraction | None, of_gold: bool) -> bool:
    """Whether two numbers, nearly equal, differ by no more than a decimal's own precision.

    Args:
        half: half a unit of the last digit of the decimal among them.
        of_gold: whether that is the gold's; an answer counts only to three digits.
    """
    gap = abs(gold - found)
    own = half or Fraction(0)
    if not of_gold:
        own = min(own, abs(gold) / 200)
    return gap <= max(own, _RELATIVE * max(abs(gold), abs(found)))


def equal_numbers(answer: str, extracted: str) -> bool | None:
    """Whether two plain numbers are equal: exactly, or to the precision of the decimal among them.

    Returns:
        None where one of them is none, and for decimals that are nearly equal, about which
        math-verify's rounding decides.
    """
    gold = number(answer)
    if gold is None:
        return None
    found = number(extracted)
    if found is None:
        return None
    if gold.value == found.value:
        return True
    half = gold.half or found.half
    if half is None and not gold.scientific and not found.scientific:
        return False
    if abs(gold.value - found.value) > _ROUNDED:
        return False
    if not as_precise(gold.value, found.value, half, gold.half is not None):
        return False
    return True if gold.scientific or found.scientific else None
