r"""Verdicts of math-verify that are known without asking it: about plain integers and fractions.

``tests/verifiers/test_sure.py`` holds these against math-verify itself.
"""

from __future__ import annotations

import re
from fractions import Fraction

# As people write them. "007", "-0", "+5", "1,000", "1 000", "12.", "0.5" and "5%" are left to
# math-verify, and so are long fractions: it takes those that differ by 1e-15 for equal.
_NUMBER = re.compile(
    r"(\$?)(?:(0|-?[1-9][0-9]{0,14})"
    r"|(-?)(?:([1-9][0-9]{0,4})/([1-9][0-9]{0,4})"
    r"|\\[dt]?frac\{([1-9][0-9]{0,4})\}\{([1-9][0-9]{0,4})\}))\1"
)


def number(text: str) -> Fraction | None:
    r"""The value of ``12``, ``-12``, ``3/4``, ``\frac{3}{4}``, ``-\dfrac{3}{4}``, perhaps in ``$``.

    Returns:
        None for anything else.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match[2] is not None:
        return Fraction(int(match[2]))
    value = Fraction(int(match[4] or match[6]), int(match[5] or match[7]))
    return -value if match[3] else value


def equal_numbers(answer: str, extracted: str) -> bool | None:
    """Whether two plain integers or fractions are equal.

    Returns:
        None where one of them is none.
    """
    gold = number(answer)
    if gold is None:
        return None
    found = number(extracted)
    return None if found is None else gold == found
