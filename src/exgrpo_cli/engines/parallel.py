"""Several engines side by side, each in a process on GPUs of its own (data parallel).

A process opens the recipe's engine and does what it is told over a socket, in JSON. It ends with
its parent, however that ends, and what the engine has started ends too: it is in the same group.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from exgrpo_cli.engines import (
    Completion,
    Request,
    Sampling,
    engine_count,
    open_engine,
    resolve_engine,
)
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.machine import end_groups, end_with_parent, process_environments
from exgrpo_cli.models import check_policy
from exgrpo_cli.recipe import Recipe

_CLOSE_SECONDS = 30.0
_TERMINATE_SECONDS = 5.0


def engine_environments(recipe: Recipe) -> list[dict[str, str]]:
    """:func:`process_environments` of the engines that sample side by side."""
    kind = resolve_engine(recipe.rollout.engine)
    gpus_each = recipe.rollout.tensor_parallel if kind == "vllm" else 1
    return process_environments(engine_count(recipe), gpus_each)


def split(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Requests for each of ``count`` engines, those of one prompt together (its prefix is cached).

    Prompts are dealt in turn, so that the shares have about as many rows.
    """
    shares: list[list[Request]] = [[] for _ in range(count)]
    of_prompt: dict[tuple[int, ...], int] = {}
    for request in requests:
        prompt = tuple(request.prompt_ids)
        shares[of_prompt.setdefault(prompt, len(of_prompt) % count)].append(request)
    return shares


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    socket: Connection[Any, Any]


class ParallelEngine:
    """``rollout.processes`` engines as one (see :class:`exgrpo_cli.engines.Engine`)."""

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Start the processes and open the policy in each, all at the same time."""
        check_policy(policy)
        self.name = resolve_engine(recipe.rollout.engine)
        self._workers: list[_Worker] = []
        try:
            for variables in engine_environments(recipe):
                self._workers.append(_start(variables))
            self._tell("open", recipe.model_dump(mode="json"), policy)
        except BaseException:
            self._end()
            raise

    def load(self, policy: str) -> None:
        """Go over to another policy, in every process."""
        self._tell("load", policy)

    def sleep(self) -> bool:
        """Free the GPUs until the next ``load``; False where the engine cannot."""
        return all(self._tell("sleep"))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, as they finish. Ends with all processes ended
        where one fails, or the caller stops listening.
        """
        busy: dict[Connection[Any, Any], _Worker] = {}
        try:
            shares = split(requests, len(self._workers))
            for worker, share in zip(self._workers, shares, strict=True):
                if share:
                    busy[worker.socket] = worker
                    rows = [vars(request) for request in share]
                    self._send(worker, ("generate", rows, vars(sampling)))
            while busy:
                for socket in wait(list(busy)):
                    message = self._receive(busy[socket])  # type: ignore[index]
                    if message is None:
                        del busy[socket]  # type: ignore[arg-type]
                    else:
                        yield Completion(**message)
        finally:
            if busy:
                self._end()

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                _put(worker.socket, "close")
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0.0))
        self._end()

    def _tell(self, *message: Any) -> list[Any]:
        """Have all processes do the same, at the same time; what each answers."""
        try:
            for worker in self._workers:
                self._send(worker, message)
            return [self._receive(worker) for worker in self._workers]
        except BaseException:  # what the others say could no longer be told apart
            self._end()
            raise

    def _send(self, worker: _Worker, message: Any) -> None:
        try:
            _put(worker.socket, *message)
        except OSError:
            raise self._ended(worker) from None

    def _receive(self, worker: _Worker) -> Any:
        wait([worker.socket])  # a plain read may go on after a Ctrl-C: polars sets SA_RESTART
        try:
            kind, value = _take(worker.socket)
        except (EOFError, OSError):
            raise self._ended(worker) from None
        if kind == "input":
            raise InputError(value)
        if kind == "failed":
            raise StageError(f"{self._name(worker)}: {value}")
        return value

    def _name(self, worker: _Worker) -> str:
        return f"engine {self._workers.index(worker) + 1} of {len(self._workers)}"

    def _ended(self, worker: _Worker) -> StageError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_TERMINATE_SECONDS)
        code = worker.process.returncode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return StageError(f"{self._name(worker)} ended ({how}); out of memory?")

    def _end(self) -> None:
        """End the processes with their groups, whatever they are doing."""
        workers, self._workers = self._workers, []
        end_groups([worker.process for worker in workers], _TERMINATE_SECONDS)
        for worker in workers:
            worker.socket.close()


def _put(socket: Connection[Any, Any], *message: Any) -> None:
    socket.send_bytes(json.dumps(message).encode())


def _take(socket: Connection[Any, Any]) -> Any:
    return json.loads(socket.recv_bytes())


def _start(variables: dict[str, str]) -> _Worker:
    ours, theirs = Pipe()
    arguments = (str(theirs.fileno()), str(os.getpid()))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "exgrpo_cli.engines.parallel", *arguments],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=2,  # what an engine prints must not get into our results
        pass_fds=[theirs.fileno()],
        # Not in the terminal's foreground group: a Ctrl-C is for the parent, which ends us.
        process_group=0,
    )
    theirs.close()
    return _Worker(process, ours)


def main() -> None:
    """``python -m exgrpo_cli.engines.parallel SOCKET PARENT_PID``: one engine, told what to do."""
    socket: Connection[Any, Any] = Connection(int(sys.argv[1]))
    end_with_parent(int(sys.argv[2]), group=True)
    engine: Any = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            order, *arguments = _take(socket)
            if order == "close":
                break
            try:
                value = None
                if order == "open":
                    engine = open_engine(Recipe.model_validate(arguments[0]), arguments[1])
                elif order == "generate":
                    requests = [Request(**row) for row in arguments[0]]
                    for completion in engine.generate(requests, Sampling(**arguments[1])):
                        _put(socket, "row", vars(completion))
                else:
                    value = getattr(engine, order)(*arguments)
            except InputError as error:
                _put(socket, "input", str(error))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                _put(socket, "failed", f"{type(error).__name__}: {first_line(error)}")
            else:
                _put(socket, "done", value)
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
