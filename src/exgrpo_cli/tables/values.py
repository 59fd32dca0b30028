"""What the values of a table must be: the one check, on whatever a stage reads.

Keys are there and unique, numbers are finite, whole numbers fit into 32 bits and are not negative
(all of them count something), lists hold no nulls and are equally long, words are known ones, and
rows are of their step. What may be null stays so. The rules follow from the types in
:data:`exgrpo_cli.tables.SCHEMAS`. Curation reads scalar columns in DuckDB: it counts by the
condition :func:`faulty`, and where that finds anything, it has :func:`check_values` say what.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli.errors import InputError
from exgrpo_cli.tables.schemas import EQUAL_LENGTHS, KEYS, SCHEMAS, WORDS

if TYPE_CHECKING:
    import polars as pl

_HIGHEST = 2**31 - 1


def check_values(table: str, data: pl.DataFrame, path: Path, step: int | None = None) -> None:
    """Check the values of the columns that a frame has.

    Args:
        data: columns of that table, in types that can be cast to the table's.
        step: the step that all rows must be of, where there is such a column; None for any.

    Raises:
        InputError: naming the file, the column and the row, counted from 1.
    """
    check_present(table, data, path)
    for name in data.columns:
        kind = SCHEMAS[table][name][0]
        if kind.endswith("[]"):
            _check_list(table, name, data[name], path)
            continue
        wrong = _wrong(name, kind, data[name])
        if wrong is not None:
            row = wrong.arg_max() or 0
            raise InputError(f"{path}: column {name} is {_called(name, data[name][row], row)}")
    if step is not None and "step" in data.columns:
        other = data["step"] != step
        if other.any():
            row = other.arg_max() or 0
            raise InputError(
                f"{path}: {_row(data, row)} is of step {data['step'][row]}, not of step {step}"
                f" (row {row + 1}); was the file moved?"
            )
    check_unique(table, data, path)


def check_present(table: str, data: pl.DataFrame, path: Path) -> None:
    """Refuse a null where a value is needed, and lists of one row that are not equally long."""
    import polars as pl

    for name in data.columns:
        if not SCHEMAS[table][name][1] and data[name].null_count():
            row = data[name].is_null().arg_max() or 0
            raise InputError(
                f"{path}: column {name} is null in row {row + 1}; {table} needs a value"
            )
    lists = [c for c in EQUAL_LENGTHS.get(table, ()) if c in data.columns]
    for other in lists[1:]:
        unequal = data.select(
            (pl.col(lists[0]).list.len() != pl.col(other).list.len()).fill_null(False)
        ).to_series()
        if unequal.any():
            raise InputError(
                f"{path}: row {(unequal.arg_max() or 0) + 1} has {lists[0]} and {other} of"
                " different lengths; the file was not written by this tool, or was changed"
            )


def check_unique(table: str, data: pl.DataFrame, path: Path, more: str = "") -> None:
    """Refuse a key that is there twice, where the frame has all columns of the table's key;
    ``more`` ends the message, by default with the row."""
    import polars as pl

    keys = list(KEYS[table])
    if not set(keys) <= set(data.columns) or data.select(keys).n_unique() == data.height:
        return
    again = ~data.select(pl.struct(keys).is_first_distinct()).to_series()
    row = again.arg_max() or 0
    raise InputError(
        f"{path}: {keys[0]} {data[keys[0]][row]} is there more than once"
        + (more or f" (again in row {row + 1})")
    )


def _check_list(table: str, name: str, column: pl.Series, path: Path) -> None:
    import polars as pl

    sizes = column.list.len().fill_null(0)
    inner = (column if (sizes > 0).all() else column.filter(sizes > 0)).explode()
    if isinstance(inner.dtype, pl.Struct):  # a chat: every field of it is needed
        fields = [inner.struct.field(field).is_null() for field in inner.struct.fields]
        null = pl.select(pl.any_horizontal(inner.is_null(), *fields)).to_series()
    else:
        null = inner.is_null()
    found = null if null.any() else _wrong(name, SCHEMAS[table][name][0].removesuffix("[]"), inner)
    if found is None:
        return
    at = found.arg_max() or 0
    row = (sizes.cum_sum() > at).arg_max() or 0
    value = None if null[at] else inner[at]
    raise InputError(f"{path}: column {name} holds {_called(name, value, row)}")


def _wrong(name: str, kind: str, values: pl.Series) -> pl.Series | None:
    """Which values are wrong, nulls left aside; None where none is."""
    import polars as pl

    wrong: pl.Series | None = None
    if kind == "FLOAT":  # as 32 bits hold it
        wrong = ~values.cast(pl.Float32).is_finite()
    elif kind == "INTEGER":
        wrong = ~values.is_between(0, _HIGHEST)
    elif name in WORDS:
        wrong = ~values.is_in(WORDS[name])
    return wrong.fill_null(False) if wrong is not None and wrong.any() else None


def _called(name: str, value: object, row: int) -> str:
    """A wrong value and its row, in words."""
    known = f" (known: {', '.join(WORDS[name])})" if name in WORDS else ""
    return f"{'null' if value is None else value} in row {row + 1}{known}"


def _row(data: pl.DataFrame, row: int) -> str:
    """What a row is called."""
    for name, words in (("rollout_id", "rollout"), ("problem_id", "question")):
        if name in data.columns:
            return f"{words} {data[name][row]}"
    return "a row"


def faulty(table: str, columns: Sequence[str]) -> str:
    """The rules for single values of some columns as a DuckDB condition: true where a row breaks
    one."""
    lists = [name for name in EQUAL_LENGTHS.get(table, ()) if name in columns]
    found = [f"len({lists[0]}) <> len({other})" for other in lists[1:]]
    for name in columns:
        kind, nullable, _ = SCHEMAS[table][name]
        if not nullable:
            found.append(f"{name} IS NULL")
        if kind.endswith("[]"):
            one = _faulty_value("x", kind.removesuffix("[]")) or "false"
            found.append(f"len(list_filter({name}, lambda x: x IS NULL OR {one})) > 0")
        else:
            found.append(_faulty_value(name, kind))
    return f"({' OR '.join(filter(None, found))})"


def _faulty_value(name: str, kind: str) -> str:
    if kind == "FLOAT":
        return f"NOT isfinite({name})"
    if kind == "INTEGER":
        return f"{name} NOT BETWEEN 0 AND {_HIGHEST}"
    if name in WORDS:
        return f"{name} NOT IN ({', '.join(map(repr, WORDS[name]))})"
    return ""
