"""What is documented and what exists are the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from exgrpo_cli import tables
from exgrpo_cli.cli.app import app
from exgrpo_cli.recipe import load_recipe, to_toml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
Exgrpo = Callable[..., Any]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_and_options_have_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_narrow_terminal(name: str) -> None:
    page = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    for parameter in COMMANDS[name].params:
        assert all(name in page for name in parameter.opts if name.startswith("-"))
    lines = [line.rstrip() for line in page[: page.index("╭")].splitlines()]
    for line, following in pairwise(lines):  # none is broken where the next word has room
        assert not (line and following) or len(line) + 1 + len(following.split()[0]) > 79


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_readme_names_every_command(name: str) -> None:
    assert re.search(rf"`exgrpo {name}\b", README), f"the README has no `exgrpo {name}`"


def commands_in(text: str) -> list[list[str]]:
    """The `exgrpo` lines of the fenced blocks, continuation lines joined."""
    lines = []
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            match = re.match(r"\s*(?:\$ )?exgrpo ([^#|;&>]*)", line)
            if match:
                lines.append(match[1].split())
    return lines


@pytest.mark.parametrize("words", commands_in(README), ids=" ".join)
def test_the_readmes_command_lines_parse(words: list[str]) -> None:
    """Every option in the README exists (nothing is run)."""
    if words and words[0].startswith("-"):
        return
    command = COMMANDS[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    for word in words[1:]:
        if word.startswith("-"):
            assert word.split("=")[0] in known | {"--help", "--debug"}, f"{word} in {words}"


def test_the_readme_has_every_table() -> None:
    for table in tables.SCHEMAS:
        assert f"`{table}`" in README


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, exgrpo_cli.cli\n"
        "heavy = {'torch', 'transformers', 'vllm', 'duckdb', 'polars', 'math_verify', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dry_run_prints_the_resolved_recipe(exgrpo: Exgrpo, tmp_path: Path) -> None:
    arguments = ["--recipe", "recipes/demo.toml", "--set", "train.learning_rate=3e-5"]
    done = exgrpo("run", tmp_path / "run", *arguments, "--steps", 7, "--dry-run")
    assert not (tmp_path / "run").exists()
    expected = load_recipe(
        ROOT / "recipes/demo.toml", ["train.learning_rate=3e-5"], {"loop.steps": 7}
    )
    assert tomllib.loads(done.stdout) == tomllib.loads(to_toml(expected))
    done = exgrpo("init", tmp_path / "run", *arguments, "--dry-run", "--json")
    assert json.loads(done.stdout)["train"]["learning_rate"] == 3e-5


def test_version(exgrpo: Exgrpo) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert exgrpo("--version").stdout.strip() == version


def test_the_map_names_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in (ROOT / "src/exgrpo_cli").iterdir():
        if path.suffix == ".py" and not path.name.startswith("__"):
            assert path.name in text, f"CONTRIBUTING.md does not mention {path.name}"
        if path.is_dir() and not path.name.startswith("__"):
            assert f"{path.name}/" in text
