"""DuckDB over the tables of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.tables import literal_path

if TYPE_CHECKING:
    import duckdb


def literal(files: Iterable[Path]) -> list[str]:
    """File names for DuckDB's ``read_parquet``, sorted, which otherwise takes ``[`` for a glob."""
    return sorted(literal_path(file) for file in files)


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """One database in memory for all queries: opening one takes longer than most of them."""
    import duckdb

    return duckdb.connect()


def query(sql: str, parameters: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    """Rows of a DuckDB query over Parquet files, as dictionaries.

    Args:
        sql: with ``$name`` parameters.
        parameters: file lists (from :func:`literal`) and values.
        where: the file or folder, for the message.

    Raises:
        InputError: a file is damaged, or a column is missing or of another type.
    """
    import duckdb

    connection = _database().cursor()
    try:
        connection.execute(sql, dict(parameters))
        names = [column[0] for column in connection.description or []]
        return [dict(zip(names, row, strict=True)) for row in connection.fetchall()]
    except duckdb.Error as error:
        reason = first_line(error)
        raise InputError(f"{where}: cannot be read as tables of a run: {reason}") from error
    finally:
        connection.close()
