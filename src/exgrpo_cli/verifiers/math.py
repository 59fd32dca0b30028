"""Mathematical equality, by math-verify. Runs in a worker: nothing here limits time or memory.

math-verify's own limits are signal timers of the main thread, which a long operation on big
integers never sees; they are switched off, and the pool kills the worker instead.

Four things make it faster without another verdict, which the tests hold against math-verify
itself: an answer whose normalised text is the gold's is right without being parsed; LaTeX is parsed
in two stages; an equation is solved once, however many others it is compared with; and what is
proved to differ (:mod:`interval`) is not simplified to find that out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, grader, parse, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

from exgrpo_cli.verifiers import Verdict
from exgrpo_cli.verifiers.extract import last_boxed, strip_answer
from exgrpo_cli.verifiers.interval import differ

_ARITHMETIC = re.compile(r"[-+*/^()\d.,\s]+")
# math-verify may take something else than the box out of a text with these.
_NOT_ONLY_A_BOX = re.compile(r"answer|boxed|fbox", re.IGNORECASE)
_NORMALISATION = replace(LatexExtractionConfig().normalization_config, boxed="last")


class _Parser(_Latex2Sympy):  # type: ignore[misc]
    """LaTeX to sympy; the parser first predicts without the full context (SLL).

    Where that finds no error, its tree is the one of the full prediction (ANTLR's documentation of
    ``PredictionMode.SLL``); where it finds one, the full prediction decides. It is several times
    faster, as full-context predictions are never cached.
    """

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = PredictionMode.SLL
        first = parser.math

        def math() -> Any:
            try:
                return first()
            except Exception:  # what the error listener raises
                return super(_Parser, self).create_parser(latex_str).math()

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


_solve, _symbolic_eq = grader.solve, grader.sympy_symbolic_eq


@lru_cache(maxsize=1024, typed=True)
def _solved(relation: Any, symbols: frozenset[Any]) -> Any:
    return _solve(relation, set(symbols))


def _solve_once(relation: Any, symbols: set[Any]) -> Any:
    # a gold equation is compared with all of a question's wrong ones
    return _solved(relation, frozenset(symbols))


def _equal_unless_proved_to_differ(a: Any, b: Any) -> bool:
    # math-verify's last resort: whether a - b simplifies to zero
    return not differ(a, b) and _symbolic_eq(a, b)


def _verify(gold: list[Any], found: list[Any]) -> bool:
    """math-verify's ``verify``; its module is as it was afterwards."""
    grader.solve, grader.sympy_symbolic_eq = _solve_once, _equal_unless_proved_to_differ
    try:
        return bool(verify(gold, found, timeout_seconds=None))
    finally:
        grader.solve, grader.sympy_symbolic_eq = _solve, _symbolic_eq


def _inner(text: str) -> str:
    return last_boxed(text) or strip_answer(text)


def _normal(inner: str) -> str | None:
    r"""math-verify's normal form of ``\boxed{inner}``; None where it may read something else.

    The box is all that its patterns of the first two priorities match, so the text that it compares
    last is this one.
    """
    if not inner or _NOT_ONLY_A_BOX.search(inner):
        return None
    normal: str = normalize_latex(f"\\boxed{{{inner}}}", _NORMALISATION)
    return normal or None


def parse_math(text: str) -> list[Any]:
    r"""math-verify's reading of an answer: expressions, and the normalised text last.

    The answer is read as ``\boxed{answer}``, with math-verify's defaults (LaTeX and plain
    expressions). Where that gives no expression and the answer is plain arithmetic, such as
    ``-3./2``, it is read without the box.

    Returns:
        Empty when nothing can be read; only a string when no expression can be.
    """
    return _read(text)[0]


def _read(text: str) -> tuple[list[Any], str | None]:
    """:func:`parse_math`, and the normal form where the expression was parsed from just that."""
    inner = _inner(text)
    if not inner:
        return [], None
    normal = _normal(inner)
    if normal is not None:
        try:
            expression = _parse_latex(normal)
        except Exception:
            expression = None
        if expression is not None:
            return [expression, normal], normal
    parsed: list[Any] = parse(f"\\boxed{{{inner}}}", parsing_timeout=None)
    # Only arithmetic: in other text, math-verify would pick out any number.
    if all(isinstance(item, str) for item in parsed) and _ARITHMETIC.fullmatch(inner):
        parsed = parse(inner, parsing_timeout=None) or parsed
    return parsed, None


# A question's K samples share their gold answer, and many questions share wrong ones.
_read_short = lru_cache(maxsize=4096)(_read)


def _read_once(text: str) -> tuple[list[Any], str | None]:
    return _read_short(text) if len(text) <= 1000 else _read(text)


def judge(answer: str, extracted: str, explain: bool = False, whole: bool = False) -> Verdict:
    """Whether ``extracted`` equals the gold ``answer`` (math-verify is asymmetric: gold first).

    With ``whole``, ``extracted`` is running text and math-verify looks for the answer in it.

    Returns:
        Status ``unparsable`` when the gold cannot be read at all, else ``ok``. A gold that is only
        text to math-verify is compared as text. Equal texts are equal without a comparison: after
        the expressions, math-verify compares the normalised texts.
    """
    gold, normal = _read_once(answer)
    if not gold:
        return Verdict("unparsable", why="math-verify cannot read the gold answer")
    if whole:
        found = parse(extracted, parsing_timeout=None)
        correct = bool(found) and _verify(gold, found)
    elif answer.strip() == extracted.strip():
        found = gold
        correct = any(isinstance(item, str) and item.strip() for item in gold)
    elif normal is not None and normal == _normal(_inner(extracted)):
        found = gold  # parsed from the same text, to the same
        correct = True
    else:
        found = _read_once(extracted)[0]
        correct = bool(found) and _verify(gold, found)
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
    gold, normal = _read(answer)
    if not gold:
        return "math-verify cannot read it"
    if all(isinstance(item, str) for item in gold):
        return "math-verify reads no expression in it, so it is compared as text"
    if normal is None and not _ARITHMETIC.fullmatch(_inner(answer)):
        return f"math-verify reads only a part of it: {show(gold[:1])}"
    return None


def show(parsed: list[Any]) -> str:
    """A parse for people, such as ``1/2 (Rational)``; at most 500 characters."""
    return "; ".join(f"{item} ({type(item).__name__})" for item in parsed[:4])[:500]
