"""Processes of exgrpo that are killed, or kill themselves, for soak.py."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import signal
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]

_PRELOADED = [
    "duckdb", "polars", "exgrpo_cli.cli", "exgrpo_cli.engines.transformers",
    "exgrpo_cli.inspect.report", "exgrpo_cli.runs.loop", "exgrpo_cli.training.update",
    "exgrpo_cli.stages.curate", "exgrpo_cli.stages.evaluate", "exgrpo_cli.stages.rollout",
    "exgrpo_cli.stages.score", "exgrpo_cli.stages.train", "exgrpo_cli.stages.verify",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
]  # fmt: skip


@dataclass(frozen=True)
class Deadly:
    """How a process is to die by itself."""

    passed: Path
    """The file of the points that were met already."""
    chance: float = 1.0
    """The share of points that are deadly."""


class Process:
    """``exgrpo`` in a session of its own, forked from a server that has imported torch already.

    Args:
        words: the command line.
        log: gets what it says.
        deadly: it kills itself, see :func:`_die_at_new_points`.
        limit: the size in bytes that none of its files can exceed.
    """

    _context: Any = None

    def __init__(
        self, words: Sequence[object], log: Path, deadly: Deadly | None = None, limit: int = 0
    ) -> None:
        if Process._context is None:
            Process._context = multiprocessing.get_context("forkserver")
            Process._context.set_forkserver_preload(_PRELOADED)
        self.log = log
        self.words = [*map(str, words)]
        self.began = log.stat().st_size if log.exists() else 0
        arguments = (self.words, log, deadly, limit)
        self._child = Process._context.Process(target=_child, args=arguments)
        self._child.start()

    def wait(self, timeout: float = 300) -> int:
        """Its exit code; that of a signal is negative."""
        self._child.join(timeout)
        if self._child.exitcode is None:
            self.kill(signal.SIGKILL)
            raise AssertionError(f"{self.words}: still at work after {timeout} s\n{self.said()}")
        return int(self._child.exitcode)

    def sides(self) -> list[psutil.Process]:
        """Those of a lagged run that are at work."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._child.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child] * ("--only" in child.cmdline())
        return found

    def runs(self) -> bool:
        return bool(self._child.is_alive())

    def kill(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self._child.pid, number)
            except ProcessLookupError:  # it has no session of its own yet
                os.kill(self._child.pid, number)

    def said(self) -> str:
        with self.log.open("rb") as stream:
            stream.seek(self.began)
            return stream.read().decode(errors="replace")


def _child(words: list[str], log: Path, deadly: Deadly | None, limit: int) -> None:
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if deadly is not None:
        _die_at_new_points(Path(words[1]).absolute(), deadly.passed, deadly.chance)
    from exgrpo_cli.__main__ import main

    sys.argv[1:] = words
    main()


def _die_at_new_points(run: Path, passed_file: Path, chance: float) -> None:
    """Kill this process before the first call on the run's files that was not met yet.

    ``passed_file`` gets the call's name, so the next process passes it. Calls are told apart by
    the function and the file, without what is random in its name, steps from 2 on being alike.
    With a ``chance`` below 1 only that share of them is deadly. A folder that is to become the run
    counts as the run.
    """
    passed = set(passed_file.read_text().splitlines()) if passed_file.exists() else set()
    here = os.getpid()

    def full(path: Any, options: dict[str, Any]) -> Path:
        folder = path if isinstance(path, int) else options.get("dir_fd")
        parent = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
        return (parent if path is folder else parent / path).absolute()

    def of_run(path: Path) -> bool:
        made = path.is_relative_to(run.parent) and path.relative_to(run.parent).parts[:1]
        return run in path.parents or bool(made and made[0].startswith(f".{run.name}."))

    def watched(name: str, call: Callable[..., Any], paths: int) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            at = [full(one, options) for one in arguments[:paths]]
            if (
                os.getpid() == here
                and of_run(at[0])
                and at[0].exists() == (name != "mkdir")  # else nothing would happen
                and not (name == "fsync" and at[0].is_file())  # as if it were killed after it
            ):
                point = " ".join([name, *(str(one).removeprefix(str(run)) for one in at)])
                point = re.sub(r"\.[a-z0-9_]{8}\.tmp", ".tmp", point)
                point = re.sub(r"step-\d{4}[2-9]", "step-later", point)
                if point not in passed and zlib.crc32(point.encode()) < chance * 2**32:
                    with passed_file.open("a") as stream:
                        stream.write(f"{point}\n")
                    os.killpg(here, signal.SIGKILL)
            return call(*arguments, **options)

        return watch

    for name in ("replace", "rename", "link"):
        setattr(os, name, watched(name, getattr(os, name), 2))
    for name in ("unlink", "remove", "rmdir", "mkdir", "fsync"):
        setattr(os, name, watched(name, getattr(os, name), 1))
