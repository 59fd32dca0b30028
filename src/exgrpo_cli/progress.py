"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]
"""Takes one plain line."""


_PLAIN_SECONDS = 30.0


def quiet(_: str) -> None:
    """The log of a function that was given none."""


def to_stderr(line: str) -> None:
    """The command line's log. A terminal that is gone, or a full disk behind it, ends no run."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, log: Log) -> Iterator[Callable[[int], None]]:
    """Count ``total`` items; the block is given a function that advances the count.

    Args:
        what: a few words, such as ``rollout step 7``.
        total: how many items there are.
        log: gets a plain line every half minute when stderr is no terminal.
    """
    if log is to_stderr and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return

    done = 0
    said = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= _PLAIN_SECONDS and done < total:
            said = time.monotonic()
            log(f"{what}: {done} of {total}")

    yield advance
