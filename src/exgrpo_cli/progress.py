"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from exgrpo_cli.terminal import harmless

Log = Callable[[str], None]
"""Takes one plain line."""

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Protocol

    from rich.progress import Progress, TaskID

    class Advance(Protocol):
        """Counts items that are done, and the tokens in them."""

        def __call__(self, count: int, tokens: int = 0) -> None: ...


_PLAIN_SECONDS = 30.0
_shown: tuple[Progress, TaskID] | None = None
"""The line that a loop shows; what a stage counts goes into it."""


def quiet(_: str) -> None:
    """The log of a function that was given none."""


def to_stderr(line: str) -> None:
    """The command line's log. A terminal that is gone, or a full disk behind it, ends no run."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(harmless(line), file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _open_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    )


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 7 min, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def stage_line(what: str, seconds_left: float | None) -> Iterator[None]:
    """On a terminal, one line that says what a loop does and how long the rest of the whole run
    takes."""
    global _shown
    if not _on_terminal() or _shown is not None:
        yield
        return
    left = "" if seconds_left is None else f"run: {duration(seconds_left)} left"
    with _open_bar() as bar:
        _shown = bar, bar.add_task(what, total=None, speed="", left=left)
        try:
            yield
        finally:
            _shown = None


@contextmanager
def progress(what: str, total: int, log: Log) -> Iterator[Advance]:
    """Count ``total`` items, such as of ``rollout step 7``; the block is given a function that
    advances the count."""
    began = time.monotonic()
    if _shown is not None:
        bar, task = _shown
        bar.update(task, total=total, completed=0, speed="")
        yield _advance(bar, task, began)
    elif log is to_stderr and _on_terminal():
        with _open_bar() as bar:
            yield _advance(bar, bar.add_task(what, total=total, speed="", left=""), began)
    else:
        done, said = 0, began

        def advance(count: int, tokens: int = 0) -> None:
            nonlocal done, said
            done += count
            if time.monotonic() - said >= _PLAIN_SECONDS and done < total:
                said = time.monotonic()
                log(f"{what}: {done} of {total}")

        yield advance


def _advance(bar: Progress, task: TaskID, began: float) -> Advance:
    seen = 0

    def advance(count: int, tokens: int = 0) -> None:
        nonlocal seen
        seen += tokens
        speed = f"{seen / max(time.monotonic() - began, 1e-9):.0f} tokens/s" if seen else ""
        bar.update(task, advance=count, speed=speed)

    return advance
