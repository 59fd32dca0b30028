"""DuckDB as curation uses it: working tables, query files, reading and writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError

if TYPE_CHECKING:
    import duckdb


MEMORY_LIMIT = "1GB"
"""DuckDB's; beyond it, it spills to a hidden folder in the run directory."""


SPILL = ".curate-spill"


def sql_text(name: str) -> str:
    """The text of a query: ``choose`` is ``experience/sql/choose.sql``."""
    return files("exgrpo_cli.experience").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def run_sql(con: duckdb.DuckDBPyConnection, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run the statements of a query file in order; each is given the parameters that it names.

    Returns:
        The rows of the last statement.
    """
    rows: list[tuple[Any, ...]] = []
    for statement in con.extract_statements(sql_text(name)):
        wanted = {key: parameters[key] for key in statement.named_parameters}
        rows = con.execute(statement, wanted).fetchall()
    return rows


@contextmanager
def connect(spill: Path | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory database with the working tables, all empty."""
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {"memory_limit": MEMORY_LIMIT}
    if spill is not None:
        settings["temp_directory"] = str(spill.absolute())
    con = duckdb.connect(":memory:", config=settings)
    try:
        made = ["SET enable_progress_bar = false"]
        made += [
            f"CREATE TABLE {name} ("
            + ", ".join(
                f"{column} {kind}" for column, (kind, _, _) in tables.SCHEMAS[table].items()
            )
            + ")"
            for name, table in (("pool", "experience"), ("questions", "questions"))
        ]
        made += [f"CREATE TEMP TABLE {name} ({columns})" for name, columns in _WORKING.items()]
        con.execute("; ".join(made)).fetchall()
        yield con
    finally:
        con.close()


_WORKING = {
    "planned": "problem_id VARCHAR, role VARCHAR",
    "scored": "rollout_id VARCHAR, policy VARCHAR, mean_entropy FLOAT, mean_logprob FLOAT",
    "collected": "rollout_id VARCHAR, logprobs FLOAT[]",
    "problems": "problem_id VARCHAR",
    "replayed": "problem_id VARCHAR",
    "draws": "count INTEGER, questions INTEGER",
    "wanted": "rollout_id VARCHAR",
    "pool_questions": "problem_id VARCHAR, count INTEGER",
}


def fill(
    con: duckdb.DuckDBPyConnection, name: str, rows: Sequence[Sequence[Any]] | None = None
) -> None:
    """Empty a working table and put rows into it, whole columns at a time."""
    con.execute(f"DELETE FROM {name}").fetchall()
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        unnests = ", ".join(f"unnest(${i + 1})" for i in range(len(columns)))
        con.execute(f"INSERT INTO {name} SELECT {unnests}", columns).fetchall()


def glob_safe(paths: Sequence[Path]) -> list[str]:
    """Absolute paths for ``read_parquet``, which would take brackets and stars for patterns."""
    return [tables.literal_path(path.absolute()) for path in paths]


@contextmanager
def reading(*read: tuple[str, Path, Sequence[str]]) -> Iterator[None]:
    """Around queries: where DuckDB cannot read, say which of these files is at fault.

    Args:
        read: table, file and columns of each.

    Raises:
        InputError: in place of DuckDB's error, naming the file.
    """
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        for table, path, columns in read:
            tables.read_table(table, path, columns)  # the clearer message
        files = " or ".join(str(path) for _, path, _ in read[:3])
        raise InputError(f"{files}: cannot be read: {str(error).splitlines()[0]}") from error


def fill_problem_ids(con: duckdb.DuckDBPyConnection, problems: Path) -> None:
    """The ids of the problem set into the working table ``problems``."""
    if not problems.exists():
        raise InputError(f"{problems}: no such file; import the problems of the run first")
    tables.check_columns("problems", problems, ["problem_id"])
    con.execute("DELETE FROM problems").fetchall()
    with reading(("problems", problems, ["problem_id"])):
        con.execute(
            "INSERT INTO problems SELECT DISTINCT problem_id FROM read_parquet($files)",
            {"files": glob_safe([problems])},
        ).fetchall()


# Ids and hashes are all different: trying a dictionary of them took most of the time of writing.
_PARQUET = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, DICTIONARY_SIZE_LIMIT 1000"


def copy_query(con: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """Write a query's rows to a Parquet file, atomically."""
    with tables.atomic_path(path) as temporary:
        quoted = str(temporary.absolute()).replace("'", "''")
        con.execute(f"COPY ({query}) TO '{quoted}' ({_PARQUET})").fetchall()
