"""Users' files."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a file with a function ``judge``; the verifier's name."""

    def write(body: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return f"{path}:judge"

    return write
