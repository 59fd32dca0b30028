"""A worker process of :mod:`pool`: JSON lines in, JSON lines out.

A request is answered by ``{"started": true}`` once what it needs is imported (from here on the
parent measures its limit), and then by the verdict. The worker ends with its parent, whatever the
parent dies of and whatever the worker is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exgrpo_cli.verifiers import BUILT_IN, Verdict, is_function

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Arrange that this process is killed when its parent is gone."""
    if sys.platform == "linux":
        # The kernel does it, even in the middle of one endless operation on big integers.
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if sys.platform != "linux":
        threading.Thread(target=watch, daemon=True).start()


def end_group_with_this() -> None:
    """Arrange that what a user's function starts ends with this process, whatever that dies of.

    A process in the same group waits for this one's end and then kills the group. It is forked
    twice, so that it is no child of this process, for which a user's ``os.wait()`` would wait.
    """
    worker = os.getpid()
    if os.getpgrp() != worker:  # not started by the pool
        return
    handle = None
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        handle = os.pidfd_open(worker)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        if handle is not None:
            os.close(handle)
        return
    try:
        if os.fork():
            os._exit(0)
        # The pipes must close when the worker ends.
        os.closerange(0, 4096 if handle is None else handle)
        if handle is not None:
            os.closerange(handle + 1, 4096)
            select.select([handle], [], [])
        else:
            while True:  # until there is no such process
                os.kill(worker, 0)
                time.sleep(0.5)
    finally:
        os.killpg(worker, signal.SIGKILL)


def limit_memory(megabytes: int | None) -> None:
    """Limit the address space to what is mapped now and so much more; None lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if megabytes is not None:
        soft = _mapped() + megabytes * 2**20
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
    # macOS refuses any limit on the address space
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mapped() -> int:
    """Bytes of address space in use; 0 where /proc is not there."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def limit_cpu(seconds: float) -> None:
    """A last resort where no signal announces the parent's death: the kernel ends a process that
    has used so much more processor time. The parent's own limit comes long before it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    soft = int(used + 60 + seconds * (os.cpu_count() or 1))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def prepare(verifier: str) -> Any:
    """Import a verifier: the built-in's module, or the user's function."""
    if verifier in BUILT_IN:
        module = importlib.import_module(f"exgrpo_cli.verifiers.{verifier}")
        module.judge("1", "1/2")  # what is made at the first call belongs to the import
        # Parsing makes much that is not yet garbage; what the imports made never will be.
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        return module
    from exgrpo_cli.verifiers import function

    return function.load(verifier)


def describe(error: BaseException) -> str:
    """An error in one line of at most 500 characters."""
    try:
        lines = str(error).strip().splitlines()
    except BaseException:  # a user's class may fail even here
        lines = []
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]


def answer(request: dict[str, Any], prepared: Any) -> dict[str, Any]:
    """The reply to one request: a verdict, or for ``check`` what is wrong with a gold answer."""
    builtin = request["verifier"] in BUILT_IN
    if request.get("check"):
        return {"fault": prepared.check_gold(request["answer"]) if builtin else None}
    begin = time.perf_counter()
    if builtin:
        options = {"whole": True} if request.get("whole") else {}
        verdict: Verdict = prepared.judge(
            request["answer"],
            request["extracted"],
            explain=request.get("explain", False),
            **options,
        )
    else:
        from exgrpo_cli.verifiers import function

        verdict = function.judge(
            prepared, request["response"], request["answer"], request.get("metadata") or {}
        )
    return asdict(verdict) | {"seconds": time.perf_counter() - begin}


def serve(
    requests: Any, reply: Callable[[dict[str, Any]], None], memory_mb: int, timeout: float
) -> None:
    """Answer requests until the pipe closes."""
    prepared: dict[str, Any] = {}
    for line in requests:
        request = json.loads(line)
        verifier = request["verifier"]
        if verifier not in prepared:
            limit_memory(None)
            if is_function(verifier) and not any(is_function(name) for name in prepared):
                end_group_with_this()
            try:
                prepared[verifier] = prepare(verifier)
            except BaseException as error:  # a user's file may even call sys.exit
                reply({"refused": describe(error)})
                continue
            limit_memory(memory_mb)
        limit_cpu(timeout)
        reply({"started": True})
        begin = time.perf_counter()
        try:
            result = answer(request, prepared[verifier])
        except MemoryError:
            why = f"more than {memory_mb} MiB of memory"
            result = {"status": "error", "why": why, "full": True}
        # RecursionError, math-verify's TimeoutException (a BaseException), and whatever a user's
        # function raises
        except BaseException as error:
            result = {"status": "error", "why": describe(error)}
        if result.get("status") == "error":
            result["seconds"] = time.perf_counter() - begin
        reply(result)


def main() -> None:
    """``python -m exgrpo_cli.verifiers.worker PARENT_PID MEMORY_MB TIMEOUT``."""
    parent, memory_mb, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # What a user's function prints goes to stderr, and it reads an empty stdin.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    requests = os.fdopen(os.dup(0), encoding="ascii")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    with contextlib.suppress(BrokenPipeError):
        reply({"ready": True})
        serve(requests, reply, memory_mb, timeout)
    os._exit(0)  # whatever threads a user's function has started


if __name__ == "__main__":
    main()
