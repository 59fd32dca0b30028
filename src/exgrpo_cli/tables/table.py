"""Tables as files: checked reading, atomic writing."""

from __future__ import annotations

import glob
import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.tables.files import atomic_path
from exgrpo_cli.tables.parts import parquet_files
from exgrpo_cli.tables.schemas import SCHEMAS, polars_schema
from exgrpo_cli.tables.values import check_present, check_unique, check_values

if TYPE_CHECKING:
    import polars as pl


def write_table(table: str, data: pl.DataFrame, path: Path) -> None:
    """Write a whole table file atomically, with exactly the schema's columns in order."""
    check_frame(table, data, path)
    # Opened here: interrupted, polars' threads may yet open a path that they were given.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        data.select(list(SCHEMAS[table])).write_parquet(file, compression="zstd")


def write_frames(table: str, frames: Iterator[pl.DataFrame], path: Path) -> None:
    """As :func:`write_table`, frame after frame (one at least); all but the first wait on disk."""
    import polars as pl

    first = next(frames)
    second = next(frames, None)
    if second is None:
        write_table(table, first, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.parts"):  # of a killed process
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", suffix=".parts", dir=path.parent
    ) as folder:
        files = []
        for number, frame in enumerate(itertools.chain((first, second), frames)):
            files.append(Path(folder) / f"{number:08d}.parquet")
            write_table(table, frame, files[-1])
        # Opened here, as in write_table.
        with atomic_path(path) as temporary, temporary.open("wb") as out:
            pl.scan_parquet(files, glob=False).sink_parquet(
                out, compression="zstd", maintain_order=True
            )


def read_table(
    table: str,
    paths: Path | Sequence[Path],
    columns: Sequence[str] | None = None,
    *,
    step: int | None = None,
) -> pl.DataFrame:
    """Read and check a table (a file, a folder of parts, or several of either).

    Args:
        columns: only these (and only these are read from disk); all by default.
        step: the step that all rows must be of, where ``step`` is among the columns.

    Raises:
        InputError: no such file, not Parquet, a missing column, another type, a value that cannot
            be (see :func:`exgrpo_cli.tables.values.check_values`), or a key that is there twice.
    """
    import polars as pl

    roots = [paths] if isinstance(paths, Path) else list(paths)
    files = [file for root in roots for file in parquet_files(root)]
    wanted = list(columns) if columns is not None else list(SCHEMAS[table])
    frames = []
    for file in files:
        check_columns(table, file, wanted)
        try:
            part = pl.read_parquet(file, columns=wanted, glob=False)
        except Exception as error:  # polars raises several kinds on a damaged page
            raise InputError(_damaged(file, error)) from error
        part = part.select(wanted)
        check_values(table, part, file, step)
        frames.append(part.cast({c: polars_schema(table)[c] for c in wanted}))
    if not frames:
        schema = polars_schema(table)
        return pl.DataFrame(schema={c: schema[c] for c in wanted})
    data = pl.concat(frames, rechunk=False)
    if len(frames) > 1:
        check_unique(table, data, files[0].parent, "; are parts of two divisions lying together?")
    return data


def _damaged(path: Path, error: Exception) -> str:
    with path.open("rb") as handle:
        if handle.read(4) != b"PAR1":
            return (
                f"{path}: not a Parquet table; problems in other formats are imported with:"
                f" exgrpo problems {path} --out problems.parquet"
            )
    reason = first_line(error)
    return f"{path}: not a readable Parquet file (truncated or damaged?): {reason}"


def check_columns(table: str, path: Path, columns: Sequence[str] | None = None) -> None:
    """Check a file's columns against the schema by its footer alone."""
    import polars as pl

    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected a Parquet table of {table}")
    try:
        with path.open("rb") as handle:  # by handle: polars takes brackets in names for patterns
            found = pl.read_parquet_schema(handle)
    except Exception as error:
        raise InputError(_damaged(path, error)) from error
    _check_schema(table, found, path, SCHEMAS[table] if columns is None else columns)


def _check_schema(
    table: str, found: Mapping[str, pl.DataType], path: Path, columns: Iterable[str]
) -> None:
    expected = polars_schema(table)
    for name in columns:
        kind, _, meaning = SCHEMAS[table][name]
        if name not in found:
            raise InputError(
                f"{path}: column {name} is missing; a {table} table needs {name} {kind} ({meaning})"
            )
        if not _readable_as(found[name], expected[name]):
            raise InputError(
                f"{path}: column {name} is {found[name]}; a {table} table needs {kind}"
            )


def _readable_as(found: pl.DataType, expected: pl.DataType) -> bool:
    """Whether a column can be cast without changing its meaning (integer to integer, and so on)."""
    import polars as pl

    if found == expected:
        return True
    if isinstance(found, pl.List) and isinstance(expected, pl.List):
        return _readable_as(found.inner, expected.inner)  # type: ignore[arg-type]
    if isinstance(found, pl.Struct) and isinstance(expected, pl.Struct):
        inner = {field.name: field.dtype for field in found.fields}
        return all(
            field.name in inner and _readable_as(inner[field.name], field.dtype)  # type: ignore[arg-type]
            for field in expected.fields
        )
    if found.is_integer() and expected.is_integer():
        return True
    return found.is_float() and expected.is_float()


def check_frame(table: str, data: pl.DataFrame, path: Path) -> None:
    """Check a frame that is about to be written."""
    _check_schema(table, data.schema, path, SCHEMAS[table])
    check_present(table, data.select(list(SCHEMAS[table])), path)
