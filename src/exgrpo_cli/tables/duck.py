"""DuckDB over the tables of a run: opened, given file names, and written from here alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import interrupts
from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.tables.files import atomic_path

if TYPE_CHECKING:
    import duckdb


@contextmanager
def open_database(
    spill: Path | None = None, **settings: str | bool | int
) -> Iterator[duckdb.DuckDBPyConnection]:
    """An empty database in memory, closed at the end.

    Args:
        spill: folder for what does not fit into memory.
        **settings: DuckDB's own, such as ``threads=1`` or ``memory_limit="1GB"``.
    """
    # While its threads are at a query, this one waits for them and sees no signal.
    with _opened(spill, **settings) as con, interrupts.ended_by(con.interrupt):
        yield con


def _opened(spill: Path | None = None, **settings: str | bool | int) -> duckdb.DuckDBPyConnection:
    import duckdb

    config: dict[str, Any] = {} if spill is None else {"temp_directory": str(spill.absolute())}
    con = duckdb.connect(":memory:", config=config)
    for name, value in {"enable_progress_bar": False, **settings}.items():
        con.execute(f"SET {name} = '{value}'").fetchall()  # some are known only once it is open
    return con


def literal(files: Iterable[Path]) -> list[str]:
    """Absolute file names for DuckDB's ``read_parquet``, which takes brackets and stars for
    patterns; sorted."""
    return sorted(re.sub(r"([\[*?])", r"[\1]", str(file.absolute())) for file in files)


# Ids and hashes are all different: trying a dictionary of them took most of the time of writing.
# atomic_path has a temporary file already; DuckDB's own would stay after a kill.
_PARQUET = (
    "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, DICTIONARY_SIZE_LIMIT 1000,"
    " USE_TMP_FILE false"
)


def write_query(con: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """Write a query's rows to a Parquet file, atomically."""
    with atomic_path(path) as temporary:
        quoted = str(temporary.absolute()).replace("'", "''")
        con.execute(f"COPY ({query}) TO '{quoted}' ({_PARQUET})").fetchall()


def named_rows(result: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """What a statement returned, a dictionary a row."""
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """One database for all of :func:`query`: opening one takes longer than most of them."""
    return _opened()


def query(sql: str, parameters: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    """Rows of a DuckDB query over Parquet files, as dictionaries."""
    import duckdb

    with _database().cursor() as cursor, interrupts.ended_by(cursor.interrupt):
        try:
            return named_rows(cursor.execute(sql, dict(parameters)))
        except duckdb.Error as error:
            reason = first_line(error)
            raise InputError(f"{where}: cannot be read as tables of a run: {reason}") from error
