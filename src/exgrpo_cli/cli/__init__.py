"""The command ``exgrpo``: options, help and exit codes. Nothing heavy is imported here."""

from __future__ import annotations

import atexit
import importlib
import io
import os
import sys
from typing import NoReturn

from exgrpo_cli.cli.app import app, drop_stdout, reader_is_gone
from exgrpo_cli.machine import processes

for _commands in ("stages", "runs", "inspect"):  # in the order of the help
    importlib.import_module(f"exgrpo_cli.cli.{_commands}")


def main(argv: list[str] | None = None) -> None:
    """Entry point; ``--debug`` may stand anywhere."""
    from rich.console import Console

    # rich's own exits with 1
    Console.on_broken_pipe = reader_is_gone  # type: ignore[method-assign, assignment]
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments = [a for a in arguments if a != "--debug"]
        os.environ["EXGRPO_DEBUG"] = "1"
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="exgrpo")
    except SystemExit as end:
        if processes() > 1:
            _leave(end)
        raise
    finally:
        _flush()


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the exit code stays
        drop_stdout()


def _leave(end: SystemExit) -> NoReturn:
    """End one of torchrun's processes without taking the interpreter apart.

    Gloo's threads outlive ``destroy_process_group`` (torch's caches keep the device mesh). One
    that frees a tensor while the interpreter is taken apart aborts a process that had finished.
    """
    atexit._run_exitfuncs()
    _flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
