"""DuckDB as curation uses it: working tables, query files, and files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.tables.duck import literal, named_rows, open_database

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "1GB"
"""DuckDB's; beyond it, it spills to a hidden folder in the run directory."""

_WORKING = {
    "planned": "problem_id VARCHAR, role VARCHAR",
    "unsampled": "problem_id VARCHAR",
    "scored": "rollout_id VARCHAR, policy VARCHAR, mean_entropy FLOAT, mean_logprob FLOAT",
    "collected": "rollout_id VARCHAR, logprobs FLOAT[]",
    "problems": "problem_id VARCHAR, source VARCHAR, metadata VARCHAR",
    "replayed": "problem_id VARCHAR",
    "draws": "count INTEGER, questions INTEGER",
    "wanted": "rollout_id VARCHAR",
    "pool_questions": "problem_id VARCHAR, count INTEGER, weight DOUBLE",
    "uses": "problem_id VARCHAR, rollout_id VARCHAR, step INTEGER",
}


@contextmanager
def connect(spill: Path | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with ``experience``, ``questions`` and the working tables, all empty;
    what does not fit into memory goes to the folder ``spill`` (of a run :func:`spill_of`)."""
    made = [f"CREATE TEMP TABLE {name} ({columns})" for name, columns in _WORKING.items()]
    for name in ("experience", "questions"):
        columns = (f"{column} {kind}" for column, (kind, _, _) in tables.SCHEMAS[name].items())
        made.append(f"CREATE TABLE {name} ({', '.join(columns)})")
    with open_database(spill, memory_limit=MEMORY_LIMIT) as con:
        con.execute("; ".join(made)).fetchall()
        yield con


def spill_of(root: Path) -> Path:
    """Where curation in a run directory spills."""
    return root / ".curate-spill"


def sql_text(name: str) -> str:
    """The text of a query: ``choose`` is ``experience/sql/choose.sql``."""
    return files("exgrpo_cli.experience").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def run_sql(
    con: duckdb.DuckDBPyConnection, name: str, text: str | None = None, **parameters: Any
) -> list[dict[str, Any]]:
    """Run the statements of a query file (or ``text``) in order, each with the parameters that it
    names; the rows of the last one."""
    rows: list[dict[str, Any]] = []
    for statement in con.extract_statements(text or sql_text(name)):
        wanted = {key: parameters[key] for key in statement.named_parameters}
        rows = named_rows(con.execute(statement, wanted))
    return rows


def fill(
    con: duckdb.DuckDBPyConnection, name: str, rows: Sequence[Sequence[Any]] | None = None
) -> None:
    """Empty a working table and put rows into it, whole columns at a time."""
    con.execute(f"DELETE FROM {name}").fetchall()
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        unnests = ", ".join(f"unnest(${i + 1})" for i in range(len(columns)))
        con.execute(f"INSERT INTO {name} SELECT {unnests}", columns).fetchall()


def fill_problems(con: duckdb.DuckDBPyConnection, problems: Path, more: Sequence[str] = ()) -> None:
    """The ids of the problem set, and more of its columns, into the working table ``problems``."""
    if not problems.exists():
        raise InputError(f"{problems}: no such file; import the problems of the run first")
    columns = ["problem_id", *more]
    tables.read_table("problems", problems, columns)  # which checks them
    fill(con, "problems")
    con.execute(
        f"INSERT INTO problems BY NAME SELECT {', '.join(columns)} FROM read_parquet($files)",
        {"files": literal([problems])},
    ).fetchall()


@contextmanager
def reading(*read: tuple[str, Path, Sequence[str]]) -> Iterator[None]:
    """Around queries: where DuckDB cannot read, say which of these files (table, file and columns
    of each) is at fault."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        for table, path, columns in read:
            tables.read_table(table, path, columns)  # the clearer message
        files = " or ".join(str(path) for _, path, _ in read[:3])
        raise InputError(f"{files}: cannot be read: {first_line(error)}") from error
