r"""Verdicts of math-verify that are known without asking it: about plain numbers.

``tests/verifiers/test_sure.py`` holds these against math-verify itself.
"""

from __future__ import annotations

import re
from fractions import Fraction

# As people write them. "007", "-0", "+5", "1 000", "12.", ".5" and "5%" are left to math-verify,
# and so are long fractions: it takes those that differ by 1e-15 for equal.
_NUMBER = re.compile(
    r"(?P<dollar>\$?)(?P<sign>-?)"
    r"(?:(?P<integer>0|[1-9][0-9]{0,14}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4})"
    r"|(?P<decimal>(?:0|[1-9][0-9]{0,7})\.[0-9]{1,6})"
    r"|(?:(?P<over>[1-9][0-9]{0,4})/|\\[dt]?frac\{(?P<above>[1-9][0-9]{0,4})\}\{)"
    r"(?P<under>[1-9][0-9]{0,4})(?(above)\})"
    r")(?P=dollar)"
)
_ROUNDED = Fraction(1, 10**5)
"""math-verify rounds decimals to six places before it compares them."""


def number(text: str) -> tuple[Fraction, bool] | None:
    r"""The value of ``12``, ``-1,200``, ``0.75``, ``3/4``, ``-\dfrac{3}{4}``, perhaps in ``$``.

    Returns:
        The value, and whether it is written as a decimal; None for anything else.
    """
    match = _NUMBER.fullmatch(text)
    if match is None or text in ("-0", "$-0$"):
        return None
    if match["integer"] is not None:
        value = Fraction(int(match["integer"].replace(",", "")))
    elif match["decimal"] is not None:
        value = Fraction(match["decimal"])
    else:
        value = Fraction(int(match["over"] or match["above"]), int(match["under"]))
    return -value if match["sign"] else value, match["decimal"] is not None


def equal_numbers(answer: str, extracted: str) -> bool | None:
    """Whether two plain numbers are equal.

    Returns:
        None where one of them is none, and for decimals that are nearly equal.
    """
    gold = number(answer)
    if gold is None:
        return None
    found = number(extracted)
    if found is None:
        return None
    if gold[0] == found[0]:
        return True
    if (gold[1] or found[1]) and abs(gold[0] - found[0]) <= _ROUNDED:
        return None
    return False
