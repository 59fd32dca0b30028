"""The application: errors become exit codes here."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn, ParamSpec

import typer

from exgrpo_cli.cli.options import with_shared
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.machine import is_first_of_machine
from exgrpo_cli.progress import to_stderr

app = typer.Typer(
    name="exgrpo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


P = ParamSpec("P")


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line and an exit code: 2 bad input, 1 failed, 130 interrupted."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = os.environ.get("EXGRPO_DEBUG") == "1"
        try:
            function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more: end at once, in silence
            _say("interrupted; what was finished is kept, the same command goes on")
            raise SystemExit(130) from None
        except BrokenPipeError:
            reader_is_gone()
        except InputError as error:
            if debug:
                raise
            _say(str(error))
            raise SystemExit(2) from None
        except StageError as error:
            if debug:
                raise
            _say(str(error))
            raise SystemExit(1) from None
        except OSError as error:
            if debug:
                raise
            where = f"{error.filename}: " if error.filename else ""
            to_stderr(f"exgrpo: {where}{error.strerror or error}")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SystemExit(2 if error.filename and not full else 1) from None
        except Exception as error:
            if debug:
                raise
            reason = first_line(error)
            to_stderr(f"exgrpo: {type(error).__name__}: {reason} (--debug shows the traceback)")
            raise SystemExit(1) from None

    return guarded


def command(panel: str, name: str | None = None) -> Callable[[Callable[..., None]], None]:
    """Add a function to the commands; a parameter ``shared`` stands for the shared options."""

    def add(function: Callable[..., None]) -> None:
        app.command(name, rich_help_panel=panel)(guarded(with_shared(function)))

    return add


def _say(line: str) -> None:
    """An error that every process of a ``torchrun`` has alike, once a machine."""
    if is_first_of_machine():
        to_stderr(f"exgrpo: {line}")


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
    """Train a reasoning model from its own experience (ExGRPO), in stages that speak through files.

    One iteration is [bold]rollout[/], [bold]verify[/], [bold]score[/], [bold]curate[/],
    [bold]train[/], each on a run directory; [bold]run[/] calls them in turn. Every stage goes on
    where it stopped, and skips what is already there.
    """
