"""The settings reference, from the types: ``python -m exgrpo_cli.recipe.reference``."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from exgrpo_cli.recipe.settings import Recipe, Section

_HEAD = """# Settings

Every key of a recipe (TOML), with what it takes and its default. `make docs` writes this page from
[settings.py](../src/exgrpo_cli/recipe/settings.py). Any key can be set for a command or a run:
`--set train.learning_rate=2e-6`; `--dry-run` prints the resolved recipe. An unknown key is an error
that names the nearest one.
"""

_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _kind(annotation: Any) -> str:
    """A type in a user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one) for one in arguments if one is not type(None))
    if annotation is JsonValue:
        return "any value"
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} numbers"
    return _WORDS[annotation]


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return f" {', '.join(found)}" if found else ""


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{k} = {json.dumps(v)}' for k, v in value.items())}}}`"
    return f"`{json.dumps(value)}`"


def _rows(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            continue
        takes = f"{_kind(field.annotation)}{_bounds(field)}"
        words = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | {takes} | {_default(field.default)} | {words} |"


def settings_reference() -> str:
    """The page docs/settings.md, a table a section."""
    head = "| key | takes | default | what it does |\n|---|---|---|---|\n"
    pages = [_HEAD, head + "\n".join(_rows(Recipe)) + "\n"]
    for name, field in Recipe.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            about = (kind.__doc__ or "").strip()
            pages.append(f"## [{name}]\n\n{about}\n\n{head}" + "\n".join(_rows(kind)) + "\n")
    return "\n".join(pages)


if __name__ == "__main__":
    print(settings_reference(), end="")
