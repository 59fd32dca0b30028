"""The application: errors become exit codes here."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Annotated, NoReturn, ParamSpec

import typer

from exgrpo_cli import interrupts
from exgrpo_cli.cli.options import with_shared
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.machine import is_first_of_machine
from exgrpo_cli.progress import to_stderr

app = typer.Typer(
    name="exgrpo",
    help="Train a reasoning model from its own experience (ExGRPO), in stages that speak through"
    " files.\n\n"
    "One iteration is [bold]rollout[/], [bold]verify[/], [bold]score[/], [bold]curate[/],"
    " [bold]train[/], each on a run directory; [bold]run[/] calls them in turn. Every stage goes"
    " on where it stopped, and skips what is already there.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


P = ParamSpec("P")

_SIGNALS_APART = 0.1
"""Seconds. A signal to all processes of a job may end one that this one waits for before it comes
here."""


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line and an exit code: 2 bad input, 1 failed, 130 or 143 interrupted."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            interrupts.begin()
            function(*args, **kwargs)
            interrupts.end()
        except (typer.Exit, SystemExit):
            raise
        except BaseException as error:  # also a Rust panic, which is no Exception
            if not isinstance(error, InputError):
                time.sleep(_SIGNALS_APART)
            if interrupts.came() or isinstance(error, KeyboardInterrupt):
                _interrupted()
            interrupts.end()
            if isinstance(error, BrokenPipeError):
                reader_is_gone()
            if os.environ.get("EXGRPO_DEBUG") == "1":
                raise
            _fail(error)
        if interrupts.came():  # something took it for an error of its own and went on
            _interrupted()

    return guarded


def _interrupted() -> NoReturn:
    interrupts.say()
    raise SystemExit(128 + (interrupts.came() or signal.SIGINT)) from None


def _fail(error: BaseException) -> NoReturn:
    if isinstance(error, InputError | StageError):
        if is_first_of_machine():  # all processes of a torchrun have it alike
            to_stderr(f"exgrpo: {error}")
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        to_stderr(f"exgrpo: {where}{error.strerror or error}")
        from exgrpo_cli.tables import FULL

        bad_input = error.filename and error.errno not in FULL
        raise SystemExit(2 if bad_input else 1) from None
    to_stderr(f"exgrpo: {type(error).__name__}: {first_line(error)} (--debug shows the traceback)")
    raise SystemExit(1) from None


def command(panel: str, name: str | None = None) -> Callable[[Callable[..., None]], None]:
    """Add a function to the commands; a parameter ``shared`` stands for the shared options.

    Its docstring is the help, without the source's line breaks: Typer would keep them.
    """

    def add(function: Callable[..., None]) -> None:
        paragraphs = (function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        app.command(name, help=text, rich_help_panel=panel)(guarded(with_shared(function)))

    return add


def reader_is_gone(*_: object) -> NoReturn:
    """End quietly where nobody reads on, as in ``exgrpo show … | head``."""
    drop_stdout()
    raise SystemExit(0)


def drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(show: bool) -> None:
    if show:
        from exgrpo_cli import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """The options that stand before a command."""
