"""The command ``exgrpo``: options, help and exit codes. Nothing heavy is imported here."""

from __future__ import annotations

import atexit
import importlib
import io
import os
import sys
from typing import Any, NoReturn

from exgrpo_cli import interrupts
from exgrpo_cli.cli.app import app, drop_stdout, reader_is_gone
from exgrpo_cli.machine import end_descendants, processes
from exgrpo_cli.progress import to_stderr

for _commands in ("stages", "runs", "inspect"):  # in the order of the help
    importlib.import_module(f"exgrpo_cli.cli.{_commands}")


def main(argv: list[str] | None = None) -> None:
    """Entry point; ``--debug`` may stand anywhere, ``help`` and ``version`` where a command does.

    A mistake in the usage is one line, as every other.
    """
    from rich.console import Console

    # rich's own exits with 1
    Console.on_broken_pipe = reader_is_gone  # type: ignore[method-assign, assignment]
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments = [a for a in arguments if a != "--debug"]
        os.environ["EXGRPO_DEBUG"] = "1"
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if arguments == ["version"]:
        arguments = ["--version"]
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(args=arguments, prog_name="exgrpo", standalone_mode=False))
    except BaseException as end:
        if interrupts.came():
            interrupts.say()  # where it landed beside the command
            _leave(128 + interrupts.came())
        if hasattr(end, "format_message"):  # Typer's own kinds
            _say_usage(end)
            sys.exit(2)
        if processes() > 1 and isinstance(end, SystemExit):
            _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    finally:
        _flush()


def _say_usage(error: Any) -> None:
    words = (error.ctx.command_path if getattr(error, "ctx", None) else "").split()[1:]
    message = " ".join(error.format_message().split()).rstrip(".?")
    if message:
        to_stderr(f"exgrpo: {message}; see: {' '.join(['exgrpo help', *words])}")


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the exit code stays
        drop_stdout()
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:  # full: Python would end with a code of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _leave(code: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    After an interrupt: Python would kill itself by the signal where C code has met it, and what the
    command has started may not have heard of it. And one of
    torchrun's: Gloo's threads outlive ``destroy_process_group`` (torch's caches keep the device
    mesh). One that frees a tensor while the interpreter is taken apart aborts a process that had
    finished.
    """
    atexit._run_exitfuncs()
    if interrupts.came():
        end_descendants()
    _flush()
    os._exit(code)
