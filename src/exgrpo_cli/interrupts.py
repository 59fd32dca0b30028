"""Ctrl-C and SIGTERM, wherever they land: one line on stderr, and exit code 130 or 143.

Both are a KeyboardInterrupt, so that work ends in its ``finally``. That does not always arrive as
one: raised within a callback of polars it becomes a Rust panic, in DuckDB a RuntimeError, in an
import an ImportError, and a finalizer swallows it. So the handler notes that the signal came:
whatever ends the command after that is the interrupt.

Schedulers send SIGTERM, and SIGKILL half a minute after it, so from SIGTERM on time is counted.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

LINE = "exgrpo: {}; what was finished is kept, the same command goes on"
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_GRACE = 20.0
"""Seconds from SIGTERM on in which the process must have ended."""

_process = 0  # that installed the handlers; those forked from it behave as Python does
_taken: list[int] = []  # signals
_stops: list[Callable[[], object]] = []
_came = 0
_swallowed_one = False
_said = False
_watched = False


def install() -> None:
    """Take over the signals for this process, before anything slow is imported.

    Until :func:`begin` and after :func:`end` there is nothing to take back, and the process ends
    at once. Leaves alone a signal that is ignored (as under ``nohup``), and does nothing a second
    time. The processes of one ``torchrun`` leave SIGTERM alone too: alone none of them has anything
    to keep, and waiting for the others it might never come to a handler.
    """
    global _process
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if "LOCAL_RANK" not in os.environ:
        defaults[signal.SIGTERM] = signal.SIG_DFL
    found = [number for number, usual in defaults.items() if signal.getsignal(number) == usual]
    if not found or _process == os.getpid():
        return
    _process, _taken[:] = os.getpid(), found
    _handle(_leave)
    # The last of Python's exit functions, as the first that is registered. What comes after it is
    # C++'s own taking apart, in which no handler of Python's would run.
    atexit.register(_handle, signal.SIG_IGN)
    if isinstance(sys.stderr, io.TextIOWrapper):
        # Python writes beside file descriptor 2, so that what Rust and C++ say there when they are
        # interrupted can be left out.
        sys.stderr = os.fdopen(
            os.dup(sys.stderr.fileno()), "w", 1, sys.stderr.encoding, sys.stderr.errors
        )


def begin() -> None:
    """From here on the signals are a KeyboardInterrupt, so that work ends in its ``finally``."""
    if _process == os.getpid():
        _handle(_raise)
        _watch()


def end() -> None:
    """From here on the signals end the process at once."""
    if _process == os.getpid():
        _handle(_leave)


def came() -> int:
    """The signal that came since :func:`begin`; 0 where none has."""
    return _came


@contextmanager
def insisting() -> Iterator[None]:
    """Around a library that swallows a KeyboardInterrupt: once a signal has come, it comes again
    every second until the block has ended."""
    import threading

    ended = threading.Event()

    def insist() -> None:
        while not ended.wait(1.0):
            if _came:
                _again()

    threading.Thread(target=insist, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextmanager
def ended_by(stop: Callable[[], object]) -> Iterator[None]:
    """Around C code that waits without looking for signals: when one comes, another thread calls
    ``stop``, again and again until a handler of Python's has been called."""
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)


def say() -> None:
    """Say it, once; from here on Ctrl-C ends the process at once and without a word, and a second
    SIGTERM does nothing: the process is ending."""
    global _said
    for number in _taken:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.SIG_DFL)
    if not _said and _speaks():
        print(_line(_came), file=sys.stderr, flush=True)
    _said = True


def _handle(handler: Any) -> None:
    for number in _taken:
        signal.signal(number, handler)


def _line(number: int) -> str:
    return LINE.format(_WORDS.get(signal.Signals(number or signal.SIGINT)))


def _speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's first process on a machine


def _leave(number: int, *_: object) -> NoReturn:
    if not _said and _speaks() and sys.stderr is not None:
        line = f"{_line(number)}\n".encode()
        os.write(sys.stderr.fileno(), line)  # print may be at work just now
    os._exit(128 + number)


def _raise(number: int, *_: object) -> None:
    global _came, _swallowed_one
    if _process != os.getpid() and number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif _process == os.getpid():
        if _came and number == signal.SIGTERM and not _swallowed_one:
            return  # what is being put in order is not to be interrupted
        _swallowed_one = False
        if not _came:
            _came = number
            sys.unraisablehook = _swallowed
            if os.environ.get("EXGRPO_DEBUG") != "1":
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            # polars or DuckDB has met the signal first, and what its error ends is not disturbed.
            # DuckDB's may be taken for that of a damaged file.
            met = type(sys.exception()).__name__
            if met == "InterruptException":
                _come_again()
            if met in ("KeyboardInterrupt", "InterruptException"):
                return
    raise KeyboardInterrupt


def _swallowed(unraisable: Any) -> None:
    """A finalizer or a callback cannot raise: the signal comes again, once it is over."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _come_again()


def _come_again() -> None:
    import threading

    again = threading.Timer(0.05, _again)
    again.daemon = True
    again.start()


def _again() -> None:
    global _swallowed_one
    import threading

    main = threading.main_thread().ident
    if main and signal.getsignal(_came) is _raise:  # the command has not ended meanwhile
        _swallowed_one = True
        signal.pthread_kill(main, _came)


def _watch() -> None:
    """Have a thread that hears of signals at once, also where no handler of Python's gets to run
    because C code does not return: a library's wait, a slow disk."""
    global _watched
    if _watched:
        return
    _watched = True
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_hear, args=(reader,), daemon=True).start()


def _hear(signals: int) -> None:
    """End what C code waits for (:func:`ended_by`), and from SIGTERM on this process in time."""
    import select
    import time

    from exgrpo_cli.machine import end_descendants

    number, never = 0, float("inf")
    ends = never
    while time.monotonic() < ends:
        waits = None if not number and ends == never else 0.1
        if select.select([signals], [], [], waits)[0]:
            *_, number = heard = os.read(signals, 64)
            if signal.SIGTERM in heard:
                ends = min(ends, time.monotonic() + _GRACE)
        if number and (_came or signal.getsignal(number) is not _raise):
            number = 0
        for stop in [*_stops] if number else []:
            with suppress(Exception):  # it may just have been closed
                stop()
    end_descendants()
    _leave(signal.SIGTERM)
