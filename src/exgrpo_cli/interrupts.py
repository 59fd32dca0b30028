"""Ctrl-C, wherever it lands: one line on stderr and exit code 130.

A KeyboardInterrupt does not always arrive as one. Raised within a callback of polars it becomes a
Rust panic, in DuckDB a RuntimeError, in an import an ImportError, and a finalizer swallows it. So
the handler notes that the signal came: whatever ends the command after that is the interrupt.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, NoReturn

LINE = "exgrpo: interrupted; what was finished is kept, the same command goes on"

_process = 0  # that installed the handlers; those forked from it behave as Python does
_came = False
_said = False


def install() -> None:
    """Take over Ctrl-C for this process, before anything slow is imported.

    Until :func:`begin` and after :func:`end` there is nothing to take back, and the process ends
    at once. Does nothing where the signal is ignored (as under ``nohup``), or a second time.
    """
    global _process
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    _process = os.getpid()
    signal.signal(signal.SIGINT, _leave)
    # The last of Python's exit functions, as the first that is registered. What comes after it is
    # C++'s own taking apart, in which no handler of Python's would run.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stderr, io.TextIOWrapper):
        # Python writes beside file descriptor 2, so that what Rust and C++ say there when they are
        # interrupted can be left out.
        sys.stderr = os.fdopen(
            os.dup(sys.stderr.fileno()), "w", 1, sys.stderr.encoding, sys.stderr.errors
        )


def begin() -> None:
    """From here on the signal is a KeyboardInterrupt, so that work ends in its ``finally``."""
    if _process == os.getpid():
        signal.signal(signal.SIGINT, _raise)


def end() -> None:
    """From here on the signal ends the process at once."""
    if _process == os.getpid():
        signal.signal(signal.SIGINT, _leave)


def came() -> bool:
    """Whether the signal came since :func:`begin`."""
    return _came


def say() -> None:
    """Say it, once; from here on the signal ends the process at once and without a word."""
    global _said
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not _said and _speaks():
        print(LINE, file=sys.stderr, flush=True)
    _said = True


def _speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's first process on a machine


def _leave(*_: object) -> NoReturn:
    if _speaks() and sys.stderr is not None:
        os.write(sys.stderr.fileno(), f"{LINE}\n".encode())  # print may be at work just now
    os._exit(130)


def _raise(*_: object) -> NoReturn:
    global _came
    if _process == os.getpid() and not _came:
        _came = True
        sys.unraisablehook = _swallowed
        if os.environ.get("EXGRPO_DEBUG") != "1":
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise KeyboardInterrupt


def _swallowed(unraisable: Any) -> None:
    """A finalizer or a callback cannot raise: the signal comes again, once it is over."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        import threading

        again = threading.Timer(0.05, _again)
        again.daemon = True
        again.start()


def _again() -> None:
    import threading

    main = threading.main_thread().ident
    if main and signal.getsignal(signal.SIGINT) is _raise:  # the command has not ended meanwhile
        signal.pthread_kill(main, signal.SIGINT)
