"""This machine's processes: none outlives the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int, *, group: bool = False) -> None:
    """Arrange that this process ends when its parent is gone, whatever either is doing.

    On Linux the kernel kills it, even in the middle of one endless operation; but also when only
    the parent's thread that started this process ends. Elsewhere, and for a group, a thread
    watches, which such an operation can hold up.

    Args:
        parent: the parent's process id, as the parent knows it: it may be gone already.
        group: the whole process group ends with it, by SIGTERM.
    """
    watched = group or sys.platform != "linux"
    if not watched:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def end() -> None:
        if group:
            os.killpg(0, signal.SIGTERM)
        else:
            os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end()

    if os.getppid() != parent:  # it was gone before we asked
        end()
    elif watched:
        threading.Thread(target=watch, daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end, also of those that have gone into
    a session of their own (Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_standard_descriptors() -> None:
    """Have 0, 1 and 2 open (``exgrpo 2>&-``), so that nothing else gets one of these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
