"""The pool's side of its processes: the server that forks them, workers, and the work's order."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

START_LIMIT = 300.0
"""Seconds that starting and importing may take (sympy from a slow network disk, a user's file)."""
_END_LIMIT = 10.0


@dataclass
class Task:
    """One request, and how often its worker has died."""

    index: int
    verifier: str
    gold: str
    line: bytes
    crashes: int = 0


class Queue:
    """Tasks by verifier, the longest first, but those of one gold answer for one worker, which
    parses it once.

    Long answers mostly take the longest, and at the end no worker should wait for another.
    """

    def __init__(self, tasks: Collection[Task]) -> None:
        self._tasks: dict[str, dict[str, deque[Task]]] = {}
        self._counts: dict[str, int] = {}
        for task in sorted(tasks, key=lambda task: len(task.line), reverse=True):
            self._group(task).append(task)

    def _group(self, task: Task) -> deque[Task]:
        self._counts[task.verifier] = self._counts.get(task.verifier, 0) + 1
        return self._tasks.setdefault(task.verifier, {}).setdefault(task.gold, deque())

    def counts(self) -> dict[str, int]:
        """How many tasks wait, by verifier; those without any are left out."""
        return {verifier: count for verifier, count in self._counts.items() if count}

    def take(self, verifier: str, last: str | None, held: Collection[str | None]) -> Task | None:
        """The verifier's next task: of the gold ``last``, else of the first that is not ``held`` by
        another worker, else of the first; None where none is left."""
        by_gold = self._tasks.get(verifier)
        if not by_gold:
            return None
        gold = last
        if gold is None or gold not in by_gold:
            gold = next((g for g in by_gold if g not in held), next(iter(by_gold)))
        task = by_gold[gold].popleft()
        if not by_gold[gold]:
            del by_gold[gold]
        self._counts[verifier] -= 1
        return task

    def put_back(self, task: Task) -> None:
        """Return a task whose worker died; it comes next of its gold."""
        self._group(task).appendleft(task)


class Server:
    """The process that workers are forked from; see :mod:`exgrpo_cli.verifiers.server`."""

    def __init__(self, memory_mb: int) -> None:
        # -P: nothing from the current folder may shadow a module. One thread each: the pool is
        # the parallelism, and thread stacks would count against the memory limit.
        threads = {
            f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")
        }
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = (str(theirs.fileno()), str(os.getpid()), str(memory_mb))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "exgrpo_cli.verifiers.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a user's function prints goes to stderr
                pass_fds=[theirs.fileno()],
                # A fixed hash seed, so that sympy's orderings, and verdicts, do not vary.
                env=os.environ | threads | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
                # Not in the terminal's foreground group: a Ctrl-C must not reach what is still
                # starting, where it would print a traceback.
                process_group=0,
            )

    def start(self, verifier: str) -> Worker:
        """Have a worker forked; an OSError where the server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                order = json.dumps(verifier).encode() + b"\n"
                socket.send_fds(self._control, [order], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return Worker(ours, verifier)

    def close(self) -> None:
        """End it; its workers are ended one by one before."""
        self._control.close()
        try:
            self._process.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Worker:
    """A worker, by the socket of its keeper, and what it is doing."""

    def __init__(self, keeper: socket.socket, verifier: str) -> None:
        self.keeper = keeper
        self.verifier = verifier
        self.ready = False
        self.task: Task | None = None
        self.gold: str | None = None  # of its last task
        self.answered = 0
        self.started = 0.0  # when it was given its task
        self.deadline = time.monotonic() + START_LIMIT
        self._buffer = b""

    def send(self, task: Task, timeout: float) -> None:
        """Give it a task; an OSError where it is gone."""
        self.keeper.sendall(task.line)
        self.task = task
        self.gold = task.gold
        self.started = time.monotonic()
        self.deadline = self.started + timeout

    def messages(self) -> list[dict[str, Any]] | None:
        """What has arrived; None when the keeper is gone."""
        try:
            data = self.keeper.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Have its keeper end it and all that it started."""
        with contextlib.suppress(OSError):
            self.keeper.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """:meth:`end`, and wait for that."""
        self.end()
        self.keeper.settimeout(_END_LIMIT)
        with contextlib.suppress(OSError):
            while self.keeper.recv(1 << 16):
                pass
        self.keeper.close()
