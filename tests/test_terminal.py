"""Text from data on a terminal: a model may write escapes, and they must not be obeyed."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exgrpo_cli.cli.options import print_result
from exgrpo_cli.evaluation import format_table
from exgrpo_cli.progress import to_stderr
from exgrpo_cli.terminal import harmless

HOSTILE = "\x1b]0;title\x07\x9b31mred\x7f\u202eeno\rover"
SHOWN = r"\x1b]0;title\x07\x9b31mred\x7f\u202eeno\x0dover"


def test_control_characters_are_written_out() -> None:
    assert harmless(HOSTILE) == SHOWN
    assert harmless("a\tb\nc é 数 \xa0 👩‍🔬") == "a\tb\nc é 数 \xa0 👩‍🔬"
    assert harmless("a\nb", keep="") == r"a\x0ab"
    assert harmless("\ud83d") == r"\ud83d"  # half of a pair cannot be printed


@given(st.text())
def test_what_is_left_has_no_control_character(text: str) -> None:
    shown = harmless(text)
    assert not [c for c in shown if (c < " " or "\x7f" <= c <= "\x9f") and c not in "\n\t"]
    assert harmless(shown) == shown


def test_results_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"text": HOSTILE, "more": [{"name": HOSTILE}]}, as_json=False)
    to_stderr(f"row {HOSTILE}: bad")
    said = capsys.readouterr()
    assert said.out == f"text: {SHOWN}\nmore: name {SHOWN}\n"
    assert said.err == f"row {SHOWN}: bad\n"
    print_result({"text": HOSTILE}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"text": HOSTILE}  # exact for programs


def test_evaluations() -> None:
    row = {
        "source": HOSTILE, "problems": 1, "samples": 1, "pass@1": 1.0, "low": 1.0, "high": 1.0,
        "truncated": 0.0, "tokens": 3,
    }  # fmt: skip
    summary = {"policy": HOSTILE, "samples": 1, "temperature": 0, "rows": [row], "overall": row}
    out = StringIO()
    Console(file=out, width=200).print(format_table(summary))
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count(r"\x1b]0;title\x07") == 2
