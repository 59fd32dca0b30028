"""What the shell completes: run directories, recipes, and recipe keys after ``--set``.

A completion waits at every keystroke, so nothing heavy is imported: the keys are read off the
settings' source, which takes milliseconds; importing it builds pydantic's schemas.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path


def _entries(incomplete: str) -> Iterator[tuple[str, Path]]:
    """What lies in the folder that is being typed and begins alike, as it would be typed."""
    typed, _, start = incomplete.rpartition("/")
    typed = incomplete[: len(incomplete) - len(start)]
    folder = Path(typed).expanduser() if typed else Path()
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            yield f"{typed}{path.name}", path


def complete_run(incomplete: str) -> list[str]:
    """Run directories, and folders on the way to them."""
    return [
        name if (path / "recipe.toml").exists() else f"{name}/"
        for name, path in _entries(incomplete)
        if path.is_dir()
    ]


def complete_recipe(incomplete: str) -> list[str]:
    """TOML files, and folders on the way to them."""
    return [
        f"{name}/" if path.is_dir() else name
        for name, path in _entries(incomplete)
        if path.is_dir() or path.suffix == ".toml"
    ]


def complete_key(incomplete: str) -> list[str]:
    """``KEY=`` of every recipe key; nothing once a value is being typed."""
    return [f"{key}=" for key in recipe_keys() if key.startswith(incomplete)]


def recipe_keys() -> list[str]:
    """Every dotted key of the recipe, from the source of the settings."""
    source = files("exgrpo_cli").joinpath("recipe", "settings.py").read_text(encoding="utf-8")
    fields = {
        node.name: [
            (one.target.id, ast.unparse(one.annotation))
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    keys = []
    for name, kind in fields["Recipe"]:
        inner = [f"{name}.{leaf}" for leaf, _ in fields.get(kind, [])]
        keys += inner or [name]
    return keys
