"""The real command as a process, and the demo model, made once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import making
import zygote

ROOT = Path(__file__).parents[1]

hypothesis.settings.register_profile("busy", deadline=None)  # how busy the machine is, is no fault
hypothesis.settings.load_profile("busy")

# Engines that start slowly, and whole runs. With --no-loadscope-reorder the workers begin with
# them, so that none is left with a long file at the end.
LONGEST = [
    "test_vllm.py", "test_iteration_engines.py", "test_train_distributed.py", "test_iteration.py",
    "test_demo.py", "test_interrupt.py", "test_drivers.py", "test_histories.py", "test_log.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        if os.environ.get("EXGRPO_REQUIRE_VLLM") == "1":
            pytest.fail("vLLM is not installed, and EXGRPO_REQUIRE_VLLM=1 asks for it")
        pytest.skip("vLLM is not installed")


class Exgrpo:
    """``exgrpo`` as processes of their own (see zygote.py)."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "zygote"
        script = Path(zygote.__file__)
        command = [sys.executable, script, "serve", self.socket]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"
        # A stand-in for the command, for a folder of the PATH.
        self.script = f'#!/bin/sh\nexec {sys.executable} -IS {script} {self.socket} "$@"\n'

    def __call__(
        self, *arguments: object, code: int = 0, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run it with these arguments; its exit code must be ``code``. More: see start."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = self.start(*arguments, stdout=out.fileno(), stderr=err.fileno(), **more)
            found = child.wait()
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess([*arguments], found, out.read(), err.read())
        assert found == code, f"exit code {found}\n{done.stdout}\n{done.stderr}"
        return done

    def start(
        self, *arguments: object, stdout: int = 1, stderr: int = 2, cwd: Path = ROOT,
        session: bool = False, before: str = "", **environment: str,
    ) -> Any:  # fmt: skip
        """A running process; ``before`` is Python that is run in it first."""
        words = [*map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "100", **environment}
        if "vllm" in words:
            return subprocess.Popen(
                [sys.executable, "-m", "exgrpo_cli", *words],
                cwd=cwd, env=environment, stdout=stdout, stderr=stderr, start_new_session=session,
            )  # fmt: skip
        with Path(os.devnull).open() as nothing:
            return zygote.Child(
                str(self.socket), words, (nothing.fileno(), stdout, stderr),
                cwd=str(cwd), env=environment, session=session, before=before,
            )  # fmt: skip


@pytest.fixture(scope="session")
def exgrpo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exgrpo]:
    made = Exgrpo(Path(tempfile.mkdtemp(prefix="exgrpo")))  # short: a socket's path has 107 bytes
    yield made
    made.server.kill()
    made.server.wait()
    shutil.rmtree(made.socket.parent)


@pytest.fixture(scope="session")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of some success on the problems beside it (see making.guesser)."""
    folder = tmp_path_factory.mktemp("guesser")
    return making.guesser(folder)


# Stands in for SLURM alone: runs a job's tasks at once, in the reverse of their order, with SLURM's
# variables, and refuses a job that depends on one that it has not seen.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
seen=$(dirname "$0")/jobs; touch "$seen"
array="" deps=""
while [[ $1 == -* ]]; do
  case $1 in
    --array=*) array=${1#--array=} ;;
    --dependency=afterok:*) deps=${1#--dependency=afterok:} ;;
  esac
  shift
done
for job in ${deps//:/ }; do grep -qx "$job" "$seen"; done
if [[ -n $array ]]; then
  first=${array%-*} last=${array#*-}
  for ((task = last; task >= first; task--)); do
    SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_MIN=$first \\
      SLURM_ARRAY_TASK_COUNT=$((last - first + 1)) bash "$@" >&2
  done
else
  bash "$@" >&2
fi
id=$((1000 + $(wc -l < "$seen"))); echo "$id" >> "$seen"; echo "$id;cluster"
"""


@pytest.fixture
def environment(tmp_path: Path, exgrpo: Exgrpo) -> dict[str, str]:
    """`exgrpo` and `sbatch` on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        ("sbatch", SBATCH),
        ("exgrpo", exgrpo.script),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
