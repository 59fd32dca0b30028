"""Numbers with a relative tolerance."""

import pytest

from exgrpo_cli.verifiers import numeric


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42.0), ("-1,234.5", -1234.5), ("1{,}000", 1000.0), (r"1\,000", 1000.0),
        ("$12", 12.0), (r"\$12.50", 12.5), ("12%", 0.12), (r"12\%", 0.12), ("12 percent", 0.12),
        ("3/4", 0.75), ("-3/4", -0.75), (r"\frac{3}{4}", 0.75), (r"-\dfrac{3}{4}", -0.75),
        (r"\frac12", 0.5), (r"1\frac12", 1.5), (r"-1\frac12", -1.5), ("1 1/2", 1.5),
        (r"-\frac{1.5}{3}", -0.5), (r"\frac{-1}{2}", -0.5), ("1.5/3", 0.5),
        ("1.2e-5", 1.2e-5), ("6.02e23", 6.02e23), ("1e-7", 1e-7), ("10^{-5}", 1e-5), ("10^5", 1e5),
        (r"1.2 \times 10^{-5}", 1.2e-5), (r"$3 \cdot 10^4$", 3e4), (".5", 0.5), ("5.", 5.0),
        ("−5", -5.0), ("- 5", -5.0), ("１２", 12.0), ("12 34", 1234.0),
        ("12 dollars", 12.0), (r"12\text{ cm}", 12.0), ("12 km/h", 12.0), ("€12", 12.0),
        ("x=12", 12.0), ("x = 3/4", 0.75), (r"t = 2.5 \text{ s}", 2.5), ("**12**", 12.0),
        (r"12^\circ", 12.0), ("(5)", 5.0), ("12 yen", 12.0), ("12元", 12.0),
        (r"\boxed{12}", 12.0), (r"\text{12}", 12.0),
        ("", None), ("x", None), ("1/0", None), ("1e9999", None), ("nan", None), ("inf", None),
        ("1,23", None), (r"\frac{a}{b}", None), ("12 = x", None), ("12, 13", None),
        ("1/2/3", None), ("9" * 5000, None), ("5/", None), ("> 5", None),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float | None) -> None:
    assert numeric.number(text) == (pytest.approx(value) if value is not None else None)


def test_tolerance() -> None:
    assert numeric.judge("1000000.5", "1000000.9").correct
    assert not numeric.judge("1000000", "1000001").correct
    assert not numeric.judge("1000000", "1000000.9").correct
    assert not numeric.judge("123456789012345678901", "123456789012345678902").correct
    assert numeric.judge("3", "2.9999999").correct
    assert numeric.judge("1/3", "0.33333333").correct
    assert not numeric.judge("1/3", "0.333").correct
    assert numeric.judge("0.5", "50%").correct
    assert not numeric.judge("0", "1e-9").correct
    assert not numeric.judge("1", "one").correct
    assert numeric.judge("one", "1").status == "unparsable"
