"""The HTML pages: a template, filled, with its style and script inside.

One file that needs nothing else and no network. A content security policy allows the page's own
script alone (by hash), whatever a rollout may contain.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

Table = dict[str, list[Any]]
"""``head``, and ``body``: rows of cells."""


def render(template: str, values: Mapping[str, Any], script: str = "") -> str:
    """A page as text. All templates ask for ``name`` and ``about``, the heading."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        loader=jinja2.FunctionLoader(_text),
    )
    environment.filters["oneline"] = lambda text: " ".join(text.split())
    code = _text(script) if script else ""
    digest = b64encode(hashlib.sha256(code.encode()).digest()).decode()
    frame = {
        "style": _text("page.css"),
        "script": code,
        "script_source": f"'sha256-{digest}'" if code else "'none'",
    }
    return environment.get_template(template).render({**frame, **values})


def _text(name: str) -> str:
    return files("exgrpo_cli.inspect").joinpath(name).read_text(encoding="utf-8")


def plain(value: Any) -> str:
    """A setting's value as a cell."""
    return "not set" if value in (None, "", {}) else str(value)
