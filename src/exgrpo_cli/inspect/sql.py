"""``exgrpo sql``: questions to a run in DuckDB's SQL, with a view for each table."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from decimal import Decimal
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from exgrpo_cli import interrupts
from exgrpo_cli.errors import InputError
from exgrpo_cli.tables import finite_or_none
from exgrpo_cli.tables.duck import open_database
from exgrpo_cli.terminal import harmless

if TYPE_CHECKING:
    import duckdb


FORMATS = ("table", "csv", "json")
_ANSWERS = ("SELECT", "EXPLAIN", "MULTI", "PRAGMA", "CALL")  # MULTI: PIVOT
_SILENT = ("CREATE", "INSERT", "UPDATE", "DELETE", "DROP", "ALTER", "SET", "TRANSACTION")
# Others write files, open other databases or load extensions.
_RUNS_FILES = re.compile(r"import\W*database|copy_database", re.IGNORECASE)
_PLANNED = re.compile(r"\AEXPLAIN\s*(?:ANALYZE\s*)?(?:\([^)]*\)\s*)?", re.IGNORECASE)


@contextlib.contextmanager
def open_run(run: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB in memory with the views of ``sql/views.sql``, in the run directory.

    The working directory is the run's within the block, so that relative paths in a query are
    those of the views. What is created lives in memory; no file is within reach but the run's,
    nothing is installed or fetched, and no setting can be changed.
    """
    import duckdb

    if not run.is_dir():
        raise InputError(f"{run}: no such run directory")
    if not any(next(run.glob(pattern), None) for pattern in ("*.parquet", "*/step-*")):
        raise InputError(f"{run}: holds no table of a run")
    views = files("exgrpo_cli.experience").joinpath("sql", "views.sql").read_text(encoding="utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="exgrpo-") as spill,
        contextlib.chdir(run),
        open_database(Path(spill), **_ALONE) as con,
    ):
        try:
            con.execute(views).fetchall()
            con.execute(f"SET allowed_directories = [{', '.join(_roots())}]")
            con.execute("SET enable_external_access = false")
            con.execute("SET lock_configuration = true")
            yield con
        except duckdb.Error as error:
            raise InputError(f"{run}: {_one_line(error)}") from error


_ALONE: dict[str, str | bool | int] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
}


def _roots() -> list[str]:
    """Here, and where links of the run's folders and tables lead: they may lie on other disks. As
    DuckDB's texts."""
    links = [path for pattern in ("*", "*/step-*") for path in Path().glob(pattern)]
    roots = {str(Path.cwd()), *(str(p.resolve()) for p in links if p.is_symlink())}
    return ["'" + root.replace("'", "''") + "'" for root in sorted(roots)]


def answer(con: duckdb.DuckDBPyConnection, text: str, form: str, out: TextIO) -> None:
    """Run SQL and write what it returns.

    Args:
        form: ``table``, ``csv`` (with a header; lists and structs as JSON) or ``json`` (an object
            a line).

    Raises:
        InputError: SQL that DuckDB refuses (its words in one line), or that writes files.
    """
    import duckdb

    try:
        for statement in con.extract_statements(text):
            _refuse_writing(con, statement)
            result = con.execute(statement)
            if statement.type.name == "EXPLAIN":
                out.write("".join(f"{row[-1]}\n" for row in result.fetchall()))
            elif statement.type.name in _ANSWERS and result.description:
                _WRITERS[form](result, out)
    except duckdb.Error as error:
        raise InputError(_one_line(error)) from error


def _refuse_writing(con: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> None:
    """Only statements that answer, or keep something in memory.

    ``EXPLAIN ANALYZE`` runs what it explains, so that is looked at too. DuckDB calls a statement
    with a pivot MULTI, whatever it does with it: then its first word counts.
    """
    import duckdb

    kind, text = statement.type.name, statement.query
    # Comments are tokens too: each goes up to the next token.
    starts = [*duckdb.tokenize(text), (len(text), None)]
    words = [
        text[at:end]
        for (at, token), (end, _) in pairwise(starts)
        if token != duckdb.token_type.comment
    ]
    code = "".join(words)
    if kind == "EXPLAIN" or words[0].strip().upper() == "EXPLAIN":
        explained = code[match.end() :] if (match := _PLANNED.match(code)) else ""
        for inner in con.extract_statements(explained):
            _refuse_writing(con, inner)
        return
    if kind == "MULTI":
        kind = words[0].strip().upper()
        if kind not in ("COPY", "EXPORT"):
            return
    if kind == "PRAGMA" and _RUNS_FILES.search(code):
        kind = "IMPORT DATABASE"
    if kind not in (*_ANSWERS, *_SILENT):
        raise InputError(
            f"{kind.replace('_', ' ')} is refused: exgrpo sql only reads; --csv or --json print"
            " what a query returns"
        )


def _one_line(error: Exception) -> str:
    """DuckDB's message without its picture of the place."""
    message = re.split(r"\n\s*\n|\nLINE ", str(error).strip())[0]
    return " ".join(message.split())


def _rows(result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while batch := result.fetchmany(1000):
        yield from batch


def _write_json(result: duckdb.DuckDBPyConnection, out: TextIO) -> None:
    names = [column[0] for column in result.description]
    for row in _rows(result):
        values = dict(zip(names, map(_plain, row), strict=True))
        out.write(json.dumps(values, ensure_ascii=False, default=str) + "\n")


def _write_csv(result: duckdb.DuckDBPyConnection, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column[0] for column in result.description])
    for row in _rows(result):
        writer.writerow([_csv_cell(value) for value in row])


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict | tuple):
        return json.dumps(_plain(value), ensure_ascii=False, default=str)
    return value


def _plain(value: Any) -> Any:
    """A value that JSON has: what is not finite is null."""
    if isinstance(value, float | Decimal):
        return finite_or_none(float(value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _write_table(result: duckdb.DuckDBPyConnection, out: TextIO) -> None:
    """Columns as wide as their values, as far as the terminal goes; numbers to the right."""
    names = [column[0] for column in result.description]
    raw = list(_rows(result))
    rows = [[_cell(value) for value in row] for row in raw]
    numbers = [
        any(isinstance(row[i], int | float | Decimal) for row in raw)
        and not any(isinstance(row[i], bool | str | list | dict) for row in raw)
        for i in range(len(names))
    ]
    room = shutil.get_terminal_size((120, 24)).columns if out.isatty() else 10_000
    widest = max(20, room - 2)
    widths = [
        min(widest, max([len(name), *(len(row[i]) for row in rows)]))
        for i, name in enumerate(names)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > 20:
        widths[widths.index(max(widths))] -= 1

    def line(cells: list[str]) -> str:
        cut = [c if len(c) <= w else c[: w - 1] + "…" for c, w in zip(cells, widths, strict=True)]
        padded = [
            c.rjust(w) if right else c.ljust(w)
            for c, w, right in zip(cut, widths, numbers, strict=True)
        ]
        return "  ".join(padded).rstrip() + "\n"

    out.write(line(names))
    out.write("  ".join("-" * width for width in widths) + "\n")
    out.writelines(line(row) for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:g}"
    return harmless(str(value).replace("\n", "\\n"), keep="")


_WRITERS: dict[str, Callable[[Any, TextIO], None]] = {
    "table": _write_table,
    "csv": _write_csv,
    "json": _write_json,
}


def prompt(con: duckdb.DuckDBPyConnection, form: str) -> None:
    """Ask for statements at the terminal, each ended by a semicolon, until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing for input())

    names = [row[0] for row in con.execute("SHOW TABLES").fetchall()]
    print(f"views: {', '.join(names)}\nend a query with ;  leave with Ctrl-D", file=sys.stderr)
    pending = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # here it ends a line, not the command
    while True:
        try:
            text = input("exgrpo> " if not pending else "   ...> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            pending = ""
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        if not pending and text.strip().rstrip(";") in (".exit", ".quit", "exit", "quit"):
            return
        pending = f"{pending}\n{text}".strip()
        if not pending.endswith(";"):
            continue
        try:
            _interruptible(con, pending, form)
        except InputError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        pending = ""


def _interruptible(con: duckdb.DuckDBPyConnection, text: str, form: str) -> None:
    """:func:`answer` on stdout in a thread: Ctrl-C does not reach a query in this one."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        before = signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            running = thread.submit(answer, con, text, form, sys.stdout)
            while wait([running], timeout=0.1).not_done:
                if stop.is_set():
                    con.interrupt()  # again and again: the query may not have started yet
        finally:
            signal.signal(signal.SIGINT, before)
    if stop.is_set():
        raise KeyboardInterrupt
    running.result()


def sql(run: Path, query: str | None, form: str) -> None:
    """Answer a query about a run on stdout; without one, those of stdin, or of a prompt where that
    is a terminal."""
    interrupts.end()  # there is nothing to take back
    with open_run(run) as con:
        if query is None and sys.stdin.isatty():
            prompt(con, form)
        else:
            _interruptible(con, sys.stdin.read() if query is None else query, form)
            sys.stdout.flush()
