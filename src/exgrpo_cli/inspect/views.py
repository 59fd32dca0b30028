"""``views.sql`` from the tables' schemas: ``python -m exgrpo_cli.inspect.views``."""

from __future__ import annotations

import textwrap

from exgrpo_cli.tables import SCHEMAS

_HEAD = """\
-- Views over a run directory, for DuckDB started in it:
--
--     cd runs/NAME && duckdb -init /path/to/views.sql
--
-- A table that has no file yet is an empty view. Columns are those of the tables as documented; in
-- plan, rollouts, verdicts, scores and curated, `file` says where a row comes from. Token lists are
-- read only by queries that name them. `make docs` writes this file from the schemas.
"""

_FILES = {
    "problems": "problems.parquet",
    "plan": "plan/step-*.parquet",
    "rollouts": "rollouts/step-*/*.parquet",
    "verdicts": "verdicts/step-*/*.parquet",
    "scores": "scores/step-*/*.parquet",
    "experience": "experience.parquet",
    "questions": "questions.parquet",
    "curated": "curated/step-*.parquet",
}
"""Where each table lies in a run directory."""


def views_sql() -> str:
    """The statements: a view for each table of a run."""
    return "\n".join([_HEAD, *(_view(table, pattern) for table, pattern in _FILES.items())])


def _view(table: str, pattern: str) -> str:
    columns = {name: kind for name, (kind, _, _) in SCHEMAS[table].items()}
    named = ""
    if "*" in pattern:
        columns["file"], named = "VARCHAR", ", filename = ''file''"
    nulls = [f"NULL::{kind} AS {name}".replace(" ", "\0") for name, kind in columns.items()]
    lines = textwrap.wrap(", ".join(nulls), 84)  # not within one of them
    empty = "\n        ".join(lines).replace("\0", " ")
    return (
        f"SET VARIABLE from_{table} = (SELECT CASE WHEN count(*) > 0\n"
        f"    THEN 'SELECT * FROM read_parquet(''{pattern}''{named})'\n"
        f"    ELSE 'SELECT {empty} WHERE false'\n"
        f"    END FROM glob('{pattern}'));\n"
        f"CREATE OR REPLACE VIEW {table} AS FROM query(getvariable('from_{table}'));\n"
    )


if __name__ == "__main__":
    print(views_sql(), end="")
