"""What is proved to differ, math-verify never takes for equal."""

import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_verify.grader import sympy_symbolic_eq

from exgrpo_cli.verifiers.interval import as_near_as_written, differ

X, Y = sympy.symbols("x y", real=True)
NUMBERS = st.one_of(
    st.integers(-9, 9).map(sympy.Integer),
    st.builds(sympy.Rational, st.integers(-9, 9), st.integers(1, 9)),
    st.sampled_from([sympy.pi, sympy.E, sympy.sqrt(2), sympy.Float("0.25")]),
)


def grown(parts: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
    return st.one_of(
        st.builds(lambda a, b: a + b, parts, parts),
        st.builds(lambda a, b: a * b, parts, parts),
        st.builds(lambda a, n: a**n, parts, st.integers(-3, 4)),
        st.builds(lambda a: sympy.sqrt(a), parts),
        parts.map(sympy.exp),
        parts.map(sympy.log),
        parts.map(sympy.sin),
        parts.map(sympy.cos),
        parts.map(sympy.tan),
    )


EXPRESSIONS = st.recursive(st.one_of(NUMBERS, st.sampled_from([X, Y])), grown, max_leaves=4)
REWRITINGS = [
    sympy.expand,
    sympy.together,
    lambda e: sympy.sin(X) ** 2 * e + sympy.cos(X) ** 2 * e,
    lambda e: e + sympy.log(X**2) - 2 * sympy.log(sympy.Abs(X)),
    lambda e: sympy.Mul(e, sympy.Pow(Y, 0, evaluate=False), evaluate=False),
    lambda e: e * sympy.sqrt(8) / sympy.sqrt(2) / 2,
]


@settings(max_examples=40, deadline=None)
@given(EXPRESSIONS, st.sampled_from(REWRITINGS))
def test_equal_expressions_are_never_proved_to_differ(expression, rewrite) -> None:  # type: ignore[no-untyped-def]
    assert not differ(expression, rewrite(expression))


@settings(max_examples=20, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
@example(X**2 + 1, X**2 + 2)
@example(sympy.sqrt(X**2), X)
@example(sympy.sin(X) ** 2, 1 - sympy.cos(X) ** 2)
@example(sympy.Float("0.1") * X + sympy.Float("0.2") * X, sympy.Float("0.3") * X)
@example(sympy.log(X * Y), sympy.log(X) + sympy.log(Y))
def test_what_differs_does_not_simplify_to_zero(a, b) -> None:  # type: ignore[no-untyped-def]
    if differ(a, b):
        assert not sympy_symbolic_eq(a, b)


def test_the_common_wrong_answers_are_proved_to_differ() -> None:
    for a, b in [
        (X**2 + 1, X**2 + 2),
        (sympy.sqrt(3), sympy.sqrt(5)),
        (2 * sympy.pi, sympy.Rational(44, 7)),
        (sympy.exp(-2 * X) / 2, sympy.exp(-X) / 2),
        (sympy.Integer(10), X),
        (sympy.log(Y), sympy.log(2 * Y)),
        (sympy.tan(X), -sympy.tan(X)),
        (X ** sympy.Rational(1, 3), X ** sympy.Rational(2, 3)),
    ]:
        assert differ(a, b)
        assert not differ(a, a)


def test_nothing_is_said_of_what_is_not_known() -> None:
    z = sympy.Symbol("z")
    for a, b in [
        (z, z + 1),  # perhaps not real
        (sympy.I, sympy.Integer(1)),
        (sympy.factorial(X), X),
        (sympy.log(-sympy.Integer(3)), sympy.Integer(1)),
        (sympy.Pow(0, -1, evaluate=False), sympy.Integer(1)),
        (sympy.oo, sympy.Integer(1)),
        (sympy.Integer(10) ** 30 + 1, sympy.Integer(10) ** 30),
        (sympy.Matrix([X]), X),
        (sympy.FiniteSet(1), sympy.Integer(1)),
        ("x", X),
    ]:
        assert not differ(a, b)
        assert not differ(b, a)


def test_numbers_are_as_near_as_they_were_written() -> None:
    small, percent = sympy.Float("6.63e-34"), sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    for gold, found, near in [
        (small, sympy.Float("6.626e-34"), True),
        (small, sympy.Float("6.64e-34"), False),
        (sympy.Rational(1, 3), sympy.Float("0.333333"), True),
        (sympy.Rational(1, 65536), sympy.Float("0.000015"), False),
        (sympy.sqrt(2), sympy.Float("1.41421356"), True),
        (sympy.Float("17.5") * percent, sympy.Float("0.175"), True),
        (1 / sympy.factorial(2004), 1 / sympy.factorial(2003), False),
        (1 / sympy.factorial(20040), 1 / sympy.factorial(20041), False),
        (1 / sympy.factorial(20040), 1 / sympy.factorial(20040), True),
        (sympy.I / 2**99, sympy.I / 2**98, False),
        (X * sympy.Float("1e-34"), X * sympy.Float("6e-34"), False),
        (X + Y, X + Y, True),
    ]:
        assert as_near_as_written(gold, found) is near
