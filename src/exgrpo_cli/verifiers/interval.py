"""A proof, by interval arithmetic, that two real expressions differ. Runs in a worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sympy
from mpmath import iv

from exgrpo_cli.verifiers.sure import as_precise

POINTS = ("0.7390", "1.6180", "0.3010")
"""Where expressions are compared: symbol i takes this, plus i times :data:`STEP`."""
STEP = "0.2214"
_FLOAT = "1e-9"
"""Relative width of a Float: more than any rounding that sympy may do in between."""
_TINY = sympy.Float("1e-20")


class _UnknownError(Exception):
    """No real value here, or none that is known."""


def differ(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` certainly have different values at some point.

    Then no simplification of ``a - b`` that keeps its values is zero. Every function is evaluated
    well inside of its real domain (fractional powers and logarithms of positive values only), and
    every operation is rounded outwards.

    Args:
        a, b: sympy expressions.

    Returns:
        False where nothing is known: for what is not real, for other functions than powers, exp,
        log, sin, cos and tan, and where the values are too near to each other.
    """
    try:
        symbols = sorted(a.free_symbols | b.free_symbols, key=str)
        if not all(isinstance(symbol, sympy.Symbol) and symbol.is_real for symbol in symbols):
            return False
        for start in POINTS if symbols else POINTS[:1]:
            at = {s: iv.mpf(start) + i * iv.mpf(STEP) for i, s in enumerate(symbols)}
            try:
                difference = _value(a, at) - _value(b, at)
            except _UnknownError:
                continue
            if difference > 0 or difference < 0:  # each True only where the whole interval is
                return True
    except Exception:  # such as deep nesting
        return False
    return False


def as_near_as_written(gold: Any, found: Any) -> bool:
    """Whether what math-verify's numeric comparison takes for equal is that to its own precision.

    It rounds to six decimals or drops what is below 1e-15, so that all tiny numbers are equal.

    Args:
        gold, found: sympy expressions that it takes for equal.
    """
    if differ(gold, found):
        numbers = [_rational(gold), _rational(found)]
        if numbers[0] is None or numbers[1] is None:
            return False
        floats = [x for x in (gold, found) if isinstance(x, sympy.Float)]
        half = _half_unit(floats[0]) if floats else None
        return as_precise(numbers[0], numbers[1], half, isinstance(gold, sympy.Float))
    try:
        if gold.free_symbols or found.free_symbols or (gold.is_Float or found.is_Float):
            return True
        # a function of which `differ` knows nothing, or something complex
        gap, size = abs((gold - found).evalf(30)), abs(gold.evalf(30))
        return bool(gap <= size * _TINY)
    except Exception:
        return True


def _rational(x: Any) -> Fraction | None:
    """The value of a real number, of a Float the decimal it was written as."""
    if isinstance(x, sympy.Rational):
        return Fraction(int(x.p), int(x.q))
    if not isinstance(x, sympy.Float):
        x = x.doit().evalf(40)
    return Fraction(Decimal(str(x))) if isinstance(x, sympy.Float) else None


def _half_unit(x: Any) -> Fraction:
    """Half a unit of the last digit of a Float that is not zero."""
    exponent = Decimal(str(x)).normalize().as_tuple().exponent
    return Fraction(10) ** int(exponent) / 2


def _value(x: Any, at: Mapping[Any, Any]) -> Any:
    """An interval that holds the value."""
    match x:
        case sympy.Symbol():
            return at[x]
        case sympy.Integer():
            return iv.mpf(int(x))
        case sympy.Rational():
            return iv.mpf(int(x.p)) / int(x.q)
        case sympy.Float():
            return iv.mpf(str(x)) * (1 + iv.mpf(_FLOAT) * iv.mpf([-1, 1]))
        case sympy.Add():
            total = iv.mpf(0)
            for arg in x.args:
                total += _value(arg, at)
            return total
        case sympy.Mul():
            product = iv.mpf(1)
            for arg in x.args:
                product *= _value(arg, at)
            return product
        case sympy.Pow():
            return _power(x.base, x.exp, at)
        case sympy.factorial() if isinstance(x.args[0], sympy.Integer) and 0 <= x.args[0] <= 10**4:
            return iv.mpf(math.factorial(int(x.args[0])))
        case sympy.exp():
            return iv.exp(_value(x.args[0], at))
        case sympy.log() if len(x.args) == 1:
            return iv.log(_positive(_value(x.args[0], at)))
        case sympy.sin():
            return iv.sin(_value(x.args[0], at))
        case sympy.cos():
            return iv.cos(_value(x.args[0], at))
        case sympy.tan():
            angle = _value(x.args[0], at)
            return iv.sin(angle) / _nonzero(iv.cos(angle))
    if x is sympy.pi:
        return +iv.pi
    if x is sympy.E:
        return +iv.e
    raise _UnknownError


def _power(base: Any, exponent: Any, at: Mapping[Any, Any]) -> Any:
    value = _value(base, at)
    if isinstance(exponent, sympy.Integer) and abs(exponent) < 2**31:
        return value ** int(exponent) if exponent > 0 else 1 / _nonzero(value) ** int(-exponent)
    return iv.exp(_value(exponent, at) * iv.log(_positive(value)))


def _positive(value: Any) -> Any:
    if not value > 0:
        raise _UnknownError
    return value


def _nonzero(value: Any) -> Any:
    if not (value > 0 or value < 0):
        raise _UnknownError
    return value
