"""The real command as a process, and the demo model, made once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

Exgrpo = Callable[..., subprocess.CompletedProcess[str]]


# Whole runs in processes of their own. With --no-loadscope-reorder the workers begin with them, so
# that none is left with a long file at the end.
LONGEST = [
    "test_iteration.py", "test_iteration_engines.py", "test_train_distributed.py", "test_vllm.py",
    "test_drivers.py", "test_curate.py", "test_cli.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        if os.environ.get("EXGRPO_REQUIRE_VLLM") == "1":
            pytest.fail("vLLM is not installed, and EXGRPO_REQUIRE_VLLM=1 asks for it")
        pytest.skip("vLLM is not installed")


def run_exgrpo(
    *arguments: object, code: int = 0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``exgrpo`` as a process of its own; its exit code must be ``code``."""
    done = subprocess.run(
        [sys.executable, "-m", "exgrpo_cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def exgrpo() -> Exgrpo:
    return run_exgrpo


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """The demo model, warmed up in full; kept in pytest's cache until demo.py changes."""
    source = (ROOT / "src/exgrpo_cli/demo.py").read_bytes()
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("demo-model") / hashlib.sha256(source).hexdigest()[:16]
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of one test run share the model
        if not folder.exists():
            run_exgrpo("demo-model", folder)
    return folder
