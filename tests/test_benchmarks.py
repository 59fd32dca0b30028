"""The benchmarks start; that they call what exists is mypy's to say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
BY_HAND = [script for script in SCRIPTS if script.stem != "train_sides"]  # which train.py starts


@pytest.mark.parametrize("script", BY_HAND, ids=lambda script: script.stem)
def test_each_says_how_it_is_used(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code
    assert f"usage: {script.name}" in capsys.readouterr().out
