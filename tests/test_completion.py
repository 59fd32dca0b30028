"""The shell completes runs, recipes and recipe keys, without importing what is heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exgrpo_cli.cli.completion import recipe_keys
from exgrpo_cli.recipe import known_keys


def complete(line: str, folder: Path) -> list[str]:
    """What bash would offer at the end of a line."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-m", "exgrpo_cli"],
        cwd=folder,
        env=os.environ
        | {"_EXGRPO_COMPLETE": "complete_bash", "COMP_WORDS": line}
        | {"COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/one", "runs/two", "notes", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/one/recipe.toml", "mine.toml", "readme.md"):
        (tmp_path / name).touch()
    return tmp_path


def test_the_keys_read_from_the_source_are_those_of_the_recipe() -> None:
    assert recipe_keys() == list(known_keys())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exgrpo run x --set train.learning_r", ["train.learning_rate="]),
        ("exgrpo run x --set train.learning_rate=1", []),
        ("exgrpo run x -s nosuch", []),
        ("exgrpo status ", ["notes/", "runs/"]),
        ("exgrpo train runs/", ["runs/one", "runs/two/"]),
        ("exgrpo run nowhere/", []),
        ("exgrpo init x --recipe m", ["mine.toml"]),
    ],
)
def test_completion(line: str, expected: list[str], folder: Path) -> None:
    assert complete(line, folder) == expected


def test_neither_help_nor_completion_builds_the_settings() -> None:
    code = (
        "import sys, exgrpo_cli.cli.completion as c, exgrpo_cli.cli\n"
        "c.recipe_keys()\n"
        "print(sorted({'pydantic', 'torch', 'polars', 'duckdb', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
