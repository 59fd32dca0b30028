"""A worker process: it judges by one verifier, told by its keeper (:mod:`server`).

A request is a line ``TOKEN JSON``; its reply is the line ``TOKEN JSON`` with the same token. What a
user's function does to this process (it may patch any module, close or write to any descriptor,
start threads and processes) can spoil its own answers only: the keeper takes nothing but a reply
with the request's token, and everything this module needs was looked up before the user's file ran.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict
from json.encoder import encode_basestring_ascii as _quote
from pathlib import Path
from typing import Any, NoReturn

from exgrpo_cli.machine import end_with_parent
from exgrpo_cli.verifiers import BUILT_IN, is_function

LOST = 70
"""Exit status of a worker whose channel to the keeper does not work any more."""
_LIMITS = tuple(getattr(resource, f"RLIMIT_{name}") for name in ("AS", "NOFILE", "FSIZE", "CPU"))


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


def limit_memory(megabytes: int) -> None:
    """Limit the address space to what is mapped now and so much more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
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


def describe(error: BaseException) -> str:
    """An error in one line of at most 500 characters."""
    try:
        lines = str(error).strip().splitlines()
    except BaseException:  # a user's class may fail even here
        lines = []
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]


def _builtin(module: Any) -> Callable[[dict[str, Any]], str]:
    """What answers a request by a built-in verifier, in JSON."""

    def answer(request: dict[str, Any]) -> str:
        options = {
            name: request[name] for name in ("explain", "whole", "metadata") if name in request
        }
        if request.get("check"):
            return json.dumps({"fault": module.check_gold(request["answer"], **options)})
        verdict = module.judge(request["answer"], request["extracted"], **options)
        return json.dumps(asdict(verdict))

    return answer


def _function(call: Any) -> Callable[[dict[str, Any]], str]:
    """What answers a request by a user's function, in JSON; afterwards the process has its folder,
    limits and timers again."""
    from exgrpo_cli.verifiers.function import caller

    judge = caller(call)
    chdir, folder, setrlimit = os.chdir, str(Path.cwd()), resource.setrlimit
    getrlimit, no_alarm, timer = resource.getrlimit, signal.setitimer, signal.ITIMER_REAL
    kept = [(kind, getrlimit(kind)[0]) for kind in _LIMITS]
    getpid, leave, me = os.getpid, os._exit, os.getpid()
    failures = (OSError, ValueError)

    def restore() -> None:
        try:
            no_alarm(timer, 0)
            chdir(folder)
            for kind, soft in kept:
                setrlimit(kind, (soft, getrlimit(kind)[1]))
        except failures:  # a folder that is gone, a hard limit that was lowered
            pass

    def answer(request: dict[str, Any]) -> str:
        if request.get("check"):
            return '{"fault": null}'
        try:
            reward, why = judge(
                request["response"], request["answer"], request.get("metadata") or {}
            )
        finally:
            if getpid() != me:  # a fork that came back must not answer too
                leave(0)
            restore()
        if reward is None:
            return f'{{"error": {_quote(why)}}}'
        return f'{{"reward": {reward!r}, "why": {_quote(why)}}}'

    return answer


def work(channel: int, keeper: int, verifier: str, memory_mb: int, token: bytes) -> NoReturn:
    """Load the verifier, say so with ``token``, and answer requests until the channel closes.

    Args:
        channel: a descriptor, connected with the keeper.
        keeper: its process id.
        memory_mb: what it may allocate beyond its imports, MiB.
        token: for the first message, ``{"ready": true}`` or ``{"refused": why}``.
    """
    read, write, leave = os.read, os.write, os._exit
    # in C; json.loads goes through what can be patched
    parse = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

    def reply(token: bytes, message: str) -> None:
        data = b"\n%b %b\n" % (token, message.encode("ascii"))
        try:
            while data:
                data = data[write(channel, data) :]
        except OSError:
            leave(LOST)

    os.setpgid(0, 0)
    end_with_parent(keeper)
    try:
        prepared = prepare(verifier)
        limit_memory(memory_mb)
        answer = (_function if is_function(verifier) else _builtin)(prepared)
    except BaseException as error:  # a user's file may even call sys.exit
        reply(token, f'{{"refused": {_quote(describe(error))}}}')
        leave(1)
    if os.getpid() == os.getpgrp():  # the user's file may have forked too
        reply(token, '{"ready": true}')
    buffer = b""
    while True:
        parts = []
        while b"\n" not in buffer:
            parts.append(buffer)
            try:
                buffer = read(channel, 1 << 20)
            except OSError:
                leave(LOST)
            if not buffer:
                leave(LOST)
        line, _, rest = buffer.partition(b"\n")
        line, buffer = b"".join([*parts, line]), rest
        token, _, text = line.partition(b" ")
        request = parse(text.decode("ascii"), 0)[0]
        try:
            message = answer(request)
        except MemoryError:
            why = _quote(f"more than {memory_mb} MiB of memory")
            message = f'{{"error": {why}, "full": true}}'
        # RecursionError, math-verify's TimeoutException (a BaseException), and whatever a user's
        # function raises
        except BaseException as error:
            message = f'{{"error": {_quote(describe(error))}}}'
        reply(token, message)
