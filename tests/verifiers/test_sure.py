"""What is known without math-verify is what math-verify says."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exgrpo_cli.verifiers.math import judge
from exgrpo_cli.verifiers.sure import equal_numbers, number


def plain(gold: str, answer: str) -> bool:
    """math-verify as its users call it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))


def written(numerator: int, denominator: int, form: str) -> str:
    sign = "-" if numerator < 0 else ""
    text = form.replace("A", str(abs(numerator))).replace("B", str(denominator))
    return text.replace("S", sign)


INTEGER = st.builds(
    lambda value, form: form.format(value),
    st.one_of(st.integers(-12, 12), st.integers(-(10**15) + 1, 10**15 - 1)),
    st.sampled_from(["{}", "${}$", "{:,}"]),
)
DECIMAL = st.builds(
    lambda value, digits: f"{value:.{digits}f}",
    st.one_of(
        st.integers(-30, 30).map(lambda n: n / 10),
        st.floats(-99_999_999, 99_999_999, allow_nan=False),
    ),
    st.integers(1, 6),
)
FRACTION = st.builds(
    written,
    st.one_of(st.integers(1, 9), st.integers(-99_999, -1), st.integers(1, 99_999)),
    st.one_of(st.integers(1, 9), st.integers(1, 99_999)),
    st.sampled_from(["SA/B", r"S\frac{A}{B}", r"S\dfrac{A}{B}", r"$S\tfrac{A}{B}$"]),
)
NUMBERS = st.one_of(INTEGER, FRACTION, DECIMAL)


@settings(max_examples=80, deadline=None)
@given(NUMBERS, NUMBERS)
@example("0", "0")
@example("0", "-7")
@example("7", "-7")
@example("999999999999999", "999999999999998")
@example(r"\frac{6}{8}", "3/4")
@example("2", r"\frac{8}{4}")
@example(r"-\frac{1}{2}", r"\frac{1}{2}")
@example("99999/99998", "99998/99997")  # as near to each other as can be
@example("99998", r"\frac{99999}{1}")
@example("1,000", "1000")
@example("999,999,999,999,999", "999999999999998")
@example("1234.50", "1,234")
@example("0.5", r"\frac{1}{2}")
@example("0.50", "1/2")
@example("0", "-0.0")
@example("5.0", "5")
@example("1/3", "0.33333")  # near, but not equal
@example("0.000020", "0.000009")
@example("99999999.999999", "100,000,000.0")
def test_plain_numbers(gold: str, answer: str) -> None:
    known = equal_numbers(gold, answer)
    if known is None:
        assert "." in gold + answer
    else:
        assert known == plain(gold, answer)


@settings(max_examples=30, deadline=None)
@given(st.integers(-99_999, 99_999), st.sampled_from([2, 4, 5, 8, 16, 20, 25]), st.integers(0, 2))
def test_a_fraction_and_its_decimal(numerator: int, denominator: int, zeros: int) -> None:
    numerator = numerator or 1
    fraction = written(numerator, denominator, "SA/B")
    decimal = f"{numerator / denominator:.4f}".rstrip("0")
    decimal += "0" * max(zeros, decimal.endswith("."))
    assert equal_numbers(fraction, decimal) is True
    assert plain(fraction, decimal)
    assert plain(decimal, fraction)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(-9_999, 9_999),
    st.integers(1, 999),
    st.integers(1, 99),
    st.sampled_from(["SA/B", r"S\frac{A}{B}"]),
)
def test_equal_fractions_of_other_terms(
    numerator: int, denominator: int, factor: int, form: str
) -> None:
    numerator = numerator or 1
    one, other = (written(numerator * k, denominator * k, form) for k in (1, factor))
    known = equal_numbers(one, other)
    assert known in (True, None)  # None where the terms are too long
    assert plain(one, other)


@pytest.mark.parametrize(
    "text",
    [
        "1 000", "1,00", "1,0000", "0,100", "1.000,5", "5%", "5\\%", "", " 5", "5 ", "5\n", "--5",
        "9" * 5000, "٣", "²", "$5", "5$", "1/0", r"\frac{1}{0}", r"\frac12", r"\frac{-1}{2}",
        "1/2/3", r"\text{5}", "5!", "2^3", "1e5", ".", "10^{x}",
    ],
)  # fmt: skip
def test_everything_else_is_left_to_math_verify(text: str) -> None:
    assert number(text) is None
    assert equal_numbers(text, text) is None
    assert equal_numbers("5", text) is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("7", "007"), ("0", "-0"), ("5", "+5"), ("0.5", ".5"), ("1" * 16, "1" * 16),
     ("1234.5", "1,234.5"), ("0", "0/5"), ("123456/7", "246912/14"), ("1/3", "0.333333"),
     ("1/3", "0.33333"), ("0.1234567", "0.1234568"), ("5", "5%")],
)  # fmt: skip
def test_and_judged_as_it_does(gold: str, answer: str) -> None:
    assert judge(gold, answer).correct == plain(gold, answer)
    assert judge(answer, gold).correct == plain(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"6.63 \times 10^{-34}", r"6.626 \times 10^{-34}", True),
        (r"6.63 \times 10^{-34}", r"6.64 \times 10^{-34}", False),
        (r"6.63 \times 10^{-34}", r"6.63 \times 10^{-33}", False),
        (r"4.5 \times 10^{33}", r"45 \times 10^{32}", True),
        (r"1 \times 10^{-3}", "0.001", True),
        (r"10^{-5}", r"\frac{1}{100000}", True),
        ("1" + "0" * 30, "1" + "0" * 29 + "1", False),
        (r"1\frac{1}{2}", "1.5", True),
        (r"-1\frac{1}{2}", r"\frac{-1}{2}", None),
        ("0.0000672", "0.000067", False),
        ("0.000067", "0.0000672", None),
        ("1/65536", "0.0000153", None),
        ("1/65536", "0.000015", False),
    ],
)
def test_numbers_differ_by_no_more_than_their_own_precision(
    gold: str, answer: str, equal: bool | None
) -> None:
    assert equal_numbers(gold, answer) is equal
