"""Where workers come from: a process without threads that imports once and forks many times.

``python -m exgrpo_cli.verifiers.server``, started by :class:`processes.Server`, forks a *keeper*
for each order, and the keeper a *worker* (:mod:`worker`). The pool talks with the keeper, in which
no user's code runs: it passes requests and replies on, and ends what a user's
function has started, with its answer and with the worker. A keeper ends with its socket, so that
nothing outlives the pool's process, and that is all it takes to end a worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from exgrpo_cli.machine import adopt_orphans, end_with_parent
from exgrpo_cli.verifiers import BUILT_IN, function, is_function
from exgrpo_cli.verifiers.worker import LOST, prepare, work

_TICK = 0.2  # seconds between looks at what ended without a sound
_END_SECONDS = 1.0  # that processes may take to end after SIGKILL
_SEND_SECONDS = 60.0
_NOISE = 1 << 24  # bytes that a function may write to its worker's channel beside its reply


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started or adopted and that have not ended."""
    try:
        found = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(name) for name in (thread / "children").read_text("ascii").split()]
        return [child for child in found if _lives(child)]
    except OSError:
        if Path(f"/proc/{pid}").exists() or sys.platform != "linux":  # a kernel without this file
            import psutil

            with contextlib.suppress(psutil.Error):
                return [child.pid for child in psutil.Process(pid).children()]
        return []


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """All processes below ``pid``, but not those in ``spared`` and what is below them."""
    found, roots = [], [pid]
    while roots:
        for child in children(roots.pop()):
            if child not in spared and child not in found:
                found.append(child)
                roots.append(child)
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class _Worker:
    """The keeper's side of a worker."""

    def __init__(self, verifier: str, memory_mb: int) -> None:
        self.verifier = verifier
        token = os.urandom(16).hex().encode()
        self.token: bytes | None = token  # of the reply that is due
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(_SEND_SECONDS)
        self.status: int | None = None
        self._spared: set[int] = set()
        self._in = b""
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _close_all_but(theirs.fileno())
                work(theirs.fileno(), keeper, verifier, memory_mb, token)
            finally:
                os._exit(1)
        theirs.close()

    def send(self, line: bytes) -> None:
        token = os.urandom(16).hex().encode()
        self.token = token
        try:
            self.channel.sendall(b"%b %b\n" % (token, line))
        except TimeoutError:  # it does not listen
            _kill([self.pid])
        except (BrokenPipeError, ConnectionResetError):  # its status comes later
            pass

    def receive(self) -> dict[str, Any] | None:
        """Its reply, if that is here; a ValueError where what came with the right token is none."""
        try:
            data = self.channel.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            self.reap(wait=True)
            return None
        *lines, self._in = (self._in + data).split(b"\n")
        if len(self._in) > _NOISE:
            self._in = b""
        for line in lines:
            token, _, text = line.partition(b" ")
            if token == self.token:
                self.token = None
                message = json.loads(text)
                if isinstance(message, dict):
                    return message
                raise ValueError("no object")
        return None

    def reap(self, wait: bool = False) -> None:
        """Take in what has ended; ``wait``: for the worker, which has closed its channel."""
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.pid:
                self.status = status
            if pid == 0:
                if self.status is not None or time.monotonic() >= deadline:
                    break
                time.sleep(0.001)
        if wait and self.status is None:  # it closed the channel and goes on
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = LOST << 8

    def spare_present(self) -> None:
        """What its file has started stays as long as the worker."""
        if is_function(self.verifier):
            self._spared = set(descendants(os.getpid(), [self.pid]) + descendants(self.pid))

    def end_started(self) -> bool:
        """End what the function has started since; False where that does not succeed."""
        if not is_function(self.verifier):
            return True
        return self._end(
            lambda: (
                descendants(os.getpid(), {self.pid, *self._spared})
                + descendants(self.pid, self._spared)
            )
        )

    def end(self) -> None:
        """End the worker and everything below it."""
        for target in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                target(self.pid, signal.SIGKILL)
        self._end(lambda: descendants(os.getpid()))

    def _end(self, living: Callable[[], list[int]]) -> bool:
        deadline = time.monotonic() + _END_SECONDS
        while pids := living():
            _kill(pids)
            self.reap()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def how(self) -> str:
        """What it died of."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        if code == LOST:
            return "its channel was closed"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def keep(pool: socket.socket, verifier: str, memory_mb: int) -> None:
    """Start a worker and pass on what the pool asks it, until the pool closes its socket.

    To the pool: ``{"ready": true}``, or ``{"refused": why}`` once; a verdict's fields, or
    ``{"fault": ...}``, for each request; ``{"died": how}`` at last where the worker ended by
    itself, with ``"idle": true`` where it had nothing to do.
    """
    adopt_orphans()
    worker = _Worker(verifier, memory_mb)

    def tell(message: dict[str, Any]) -> None:
        pool.sendall(json.dumps(message).encode() + b"\n")

    ready, asked, buffer = False, 0.0, bytearray()
    try:
        while True:
            # what a worker started may hold its channel open
            there, _, _ = select.select([pool, worker.channel], [], [], _TICK)
            if pool in there:
                data = pool.recv(1 << 20)
                if not data:
                    return
                buffer += data
                if buffer.endswith(b"\n"):  # one request at a time
                    asked = time.perf_counter()
                    worker.send(bytes(buffer[:-1]))
                    buffer.clear()
                continue
            message = None
            if worker.channel in there:
                try:
                    message = worker.receive()
                except ValueError:
                    message = {"error": "the function damaged its worker"}
            else:
                worker.reap()
            if message is not None and not ready:
                ready = "refused" not in message
                worker.spare_present()
                tell(message)
            elif message is not None:
                seconds = time.perf_counter() - asked
                if not worker.end_started():
                    worker.end()
                    tell({"died": "it starts processes faster than they can be ended"})
                    return
                asked = 0.0
                tell(_verdict(message, seconds, is_function(verifier)))
            elif worker.status is not None:
                tell({"died": worker.how(), "idle": ready and not asked})
                return
    except (BrokenPipeError, ConnectionResetError):  # the pool is gone
        return
    finally:
        worker.end()


def _verdict(message: dict[str, Any], seconds: float, own: bool) -> dict[str, Any]:
    """The fields of a verdict; ``own``: by a user's function."""
    if "fault" in message:
        return message
    if "error" not in message:
        try:
            return (function.verdict(message) if own else message) | {"seconds": seconds}
        except (KeyError, TypeError, ValueError):
            message = {"error": "the function damaged its worker"}
    why = function.storable(str(message["error"])[:500])
    full = {"full": True} if message.get("full") else {}
    return {"status": "error", "why": why, "seconds": seconds} | full


def _close_all_but(*kept: int) -> None:
    """Close all descriptors but the standard ones and these."""
    last = 2
    for number in sorted(kept):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def _serve(control: socket.socket, memory_mb: int) -> None:
    """Fork keepers until the control socket closes; an order is a verifier's name and a socket."""
    keepers: set[int] = set()
    waiting, sockets = b"", []
    while True:
        there, _, _ = select.select([control], [], [], 5 * _TICK)
        _reap(keepers)
        if not there:
            _kill(descendants(os.getpid(), keepers))  # of a keeper that was killed
            continue
        data, arrived, _, _ = socket.recv_fds(control, 1 << 16, 64)
        if not data:
            break
        sockets += arrived
        *orders, waiting = (waiting + data).split(b"\n")
        for order in orders:
            verifier, descriptor = json.loads(order), sockets.pop(0)
            if verifier in BUILT_IN:
                with contextlib.suppress(Exception):  # the worker will say why
                    prepare(verifier)
            pid = os.fork()
            if pid == 0:
                try:
                    _close_all_but(descriptor)
                    keep(socket.socket(fileno=descriptor), verifier, memory_mb)
                finally:
                    os._exit(0)
            keepers.add(pid)
            os.close(descriptor)
    deadline = time.monotonic() + 2 * _END_SECONDS
    while keepers and time.monotonic() < deadline:
        _reap(keepers)
        time.sleep(0.002)
    _kill(descendants(os.getpid()))


def _reap(keepers: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            keepers.discard(pid)


def main() -> NoReturn:
    """``python -m exgrpo_cli.verifiers.server DESCRIPTOR PARENT_PID MEMORY_MB``."""
    descriptor, parent, memory_mb = (int(text) for text in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool, which ends us
    end_with_parent(parent)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    _serve(socket.socket(fileno=descriptor), memory_mb)
    os._exit(0)


if __name__ == "__main__":
    main()
