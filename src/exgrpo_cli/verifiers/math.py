"""Mathematical equality, by math-verify. Runs in a worker: nothing here limits time or memory.

Answers are brought to one spelling (:mod:`normalise`); plain numbers (:mod:`sure`) and answers of
some forms (:mod:`shapes`) are compared without math-verify, all others by it. ``docs/verifiers.md``
lists where the verdict is another one than math-verify's; the verifier ``math_verify`` is the
library alone.

math-verify's own limits are signal timers of the main thread, which a long operation on big
integers never sees; they are switched off, and the pool kills the worker instead.

Three things make it faster without another verdict: LaTeX is parsed in two stages; an equation is
solved once, however many others it is compared with; and what is proved to differ
(:mod:`interval`) is not simplified to find that out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, grader, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

from exgrpo_cli.verifiers import Verdict, judged, math_verify
from exgrpo_cli.verifiers.extract import last_boxed, strip_answer
from exgrpo_cli.verifiers.interval import as_near_as_written, differ
from exgrpo_cli.verifiers.normalise import normalise
from exgrpo_cli.verifiers.prediction import Prediction
from exgrpo_cli.verifiers.shapes import compare
from exgrpo_cli.verifiers.sure import equal_numbers, number

_NORMALISATION = replace(LatexExtractionConfig().normalization_config, boxed="none")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq)(?![A-Za-z])")
_WORD_BEFORE = re.compile(r"(?:[^0-9\\a-zA-Z]|\\(?>[a-zA-Z]+|.)|[a-zA-Z](?![a-zA-Z]))*+[a-zA-Z]{2}")
_OPERATORS = ("^", "_", "/", "+", "-", "*", "=", "<", ">")


class _Parser(_Latex2Sympy):  # type: ignore[misc]
    """LaTeX to sympy; the parser first predicts without the full context (SLL).

    Where that finds no error, its tree is the one of the full prediction (ANTLR's documentation of
    ``PredictionMode.SLL``); where it finds one, the full prediction decides.
    """

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp = Prediction(parser)
        parser._interp.predictionMode = PredictionMode.SLL
        first = parser.math

        def math() -> Any:
            try:
                return first()
            except Exception:  # what the error listener raises
                second = super(_Parser, self).create_parser(latex_str)
                second._interp = Prediction(second)
                return second.math()

        parser.math = math
        return parser


def _parse_latex(normal: str) -> Any:
    """What math-verify makes of normalised LaTeX (its ``parse_latex_cached``)."""
    try:
        return _Parser(is_real=not should_treat_as_complex(normal)).parse(normal)
    except Exception:
        last = get_last_eq(normal)
        if last == normal:
            raise
        return _Parser(is_real=not should_treat_as_complex(last)).parse(last)


_solve, _symbolic_eq, _numeric_eq = (
    grader.solve,
    grader.sympy_symbolic_eq,
    grader.sympy_numeric_eq,
)


@lru_cache(maxsize=1024, typed=True)
def _solved(relation: Any, symbols: frozenset[Any]) -> Any:
    return _solve(relation, set(symbols))


def _solve_once(relation: Any, symbols: set[Any]) -> Any:
    # a gold equation is compared with all of a question's wrong ones
    return _solved(relation, frozenset(symbols))


def _equal_unless_proved_to_differ(a: Any, b: Any) -> bool:
    # math-verify's last resort: whether a - b simplifies to zero
    return not differ(a, b) and _symbolic_eq(a, b)


def _equal_as_written(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    # math-verify takes all numbers below 1e-6 for equal
    equal = _numeric_eq(a, b, float_rounding, numeric_precision)
    return bool(equal) and as_near_as_written(a, b)


def _verify(gold: list[Any], found: list[Any]) -> bool:
    """math-verify's ``verify``; its module is as it was afterwards."""
    grader.solve, grader.sympy_symbolic_eq = _solve_once, _equal_unless_proved_to_differ
    grader.sympy_numeric_eq = _equal_as_written
    try:
        return bool(verify(gold, found, timeout_seconds=None))
    finally:
        grader.solve, grader.sympy_symbolic_eq = _solve, _symbolic_eq
        grader.sympy_numeric_eq = _numeric_eq


def _usual(text: str) -> str:
    return normalise(last_boxed(text) or strip_answer(text))


_usual_short = lru_cache(maxsize=4096)(_usual)


def usual(text: str) -> str:
    """The usual spelling of an answer, without its box."""
    return _usual_short(text) if len(text) <= 1000 else _usual(text)


def _balanced(text: str) -> bool:
    """Whether braces are; math-verify mends those that are not."""
    depth = 0
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def _read(text: str) -> list[Any]:
    normal = normalize_latex(text, _NORMALISATION)
    if not normal:
        return [text]
    if not _balanced(text) or text.endswith(_OPERATORS):
        return [normal]
    try:
        expression = _parse_latex(normal)
    except Exception:
        expression = None
    if _WORD_BEFORE.match(text) and getattr(expression, "is_zero", False):  # "not 0": n·o·t·0
        expression = None
    return [normal] if expression is None else [expression, normal]


# A question's K samples share their gold answer, and many questions share wrong ones.
_read_short = lru_cache(maxsize=4096)(_read)


def read(text: str) -> list[Any]:
    """math-verify's reading of a normalised answer: an expression, and its normal form last.

    An answer is read whole or not at all: math-verify itself, where it cannot read the whole, takes
    any number out of it.

    Returns:
        Only a string where no expression can be read; empty for an empty text.
    """
    if not text:
        return []
    return _read_short(text) if len(text) <= 1000 else _read(text)


def _nearly(a: Any, b: Any) -> bool:
    """Whether two numbers may be the same but for rounding, to one percent; True for others."""
    try:
        return bool(abs(sympy.N(a - b)) <= abs(sympy.N(a)) / 100)
    except Exception:
        return True


def _holds(expression: Any) -> bool:
    """Whether an equation between numbers may be true: ``1000003 = 204`` is not."""
    equations = getattr(expression, "_unsorted_args", None) or (expression,)
    if not all(isinstance(equation, sympy.Eq) for equation in equations):
        return True
    return not any(
        differ(equation.lhs, equation.rhs)
        and not (equation.has(sympy.Float) and _nearly(equation.lhs, equation.rhs))
        for equation in equations
        if not (equation.lhs.free_symbols or equation.rhs.free_symbols)
    )


def _by_approximation(gold: str, found: str) -> bool:
    r"""``\pi \approx 3.14`` gives both; math-verify reads the first."""
    sides = [normalise(side) for side in _APPROXIMATELY.split(found)]
    values = [read(side)[0] for side in sides if side]
    near = all(_nearly(values[0], value) for value in values[1:])
    return near and any(_equal(gold, side) for side in sides if side)


def _equal(gold: str, found: str) -> bool:
    """Whether normalised answers are equal."""
    if gold == found:
        return True
    known = equal_numbers(gold, found)
    if known is None:
        known = compare(gold, found, _equal)
    if known is not None:
        return known
    if _APPROXIMATELY.search(found) and not _APPROXIMATELY.search(gold):
        return _by_approximation(gold, found)
    one, other = read(gold), read(found)
    if not other:
        return False
    if one[-1] == other[-1]:  # math-verify compares its normal forms, too
        return True
    return _holds(other[0]) and _verify(one, other)


def judge(answer: str, extracted: str, explain: bool = False, whole: bool = False) -> Verdict:
    """Whether ``extracted`` equals the gold ``answer`` (math-verify is asymmetric: gold first).

    With ``whole``, ``extracted`` is running text, and math-verify alone looks for the answer in it
    and judges it, see :func:`exgrpo_cli.verifiers.math_verify.judge`.

    Returns:
        Status ``unparsable`` when the gold cannot be read at all, else ``ok``. A gold that is only
        text to math-verify is compared as text.
    """
    if whole:
        return math_verify.judge(answer, extracted, explain, whole=True)
    gold, found = usual(answer), usual(extracted)
    if not gold:
        return Verdict("unparsable", why="the gold answer is empty")
    correct = bool(found) and _equal(gold, found)
    why = "equal to the gold answer" if correct else "not equal to the gold answer"
    return judged(correct, why, show(gold), show(found)) if explain else judged(correct, why)


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    gold = usual(answer)
    if not gold:
        return "it is empty"
    if number(gold) is None and all(isinstance(item, str) for item in read(gold)):
        return "math-verify reads no expression in it, so it is compared as text"
    return None


def show(text: str) -> str:
    """How a normalised answer is understood, such as ``1/2 (Rational)``; at most 500 characters."""
    plain = number(text)
    if plain is not None:
        return f"{text} (number {plain.value})"[:500]
    return math_verify.show(read(text))
