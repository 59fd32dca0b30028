"""The rows of problem files, each with its number. A row that cannot be read is a RowError."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from exgrpo_cli.errors import InputError, first_line

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""The kinds of files by their ending; the first five may also end in ``.gz``."""

# Long texts that no verifier needs: other models' responses and what was said about them.
LEFT_OUT = {
    "generations",
    "generated_solution",
    "messages",
    "target",
    "is_reasoning_complete",
    "correctness_math_verify",
    "correctness_llama",
    "finish_reasons",
}
# What libraries write beside the rows.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_LONG_NUMBER = "an integer too long to be read; write it as text, in quotes"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what a byte that is no UTF-8 is decoded to
_ROWS_READ = 200_000
_WHOLE_ROWS_READ = 2_000


class RowError(Exception):
    """What is wrong with a row; the caller adds file and row."""


class Number(float):
    """A JSON number that keeps its text: ``1e-7`` must not become ``1e-07``, nor ``1.0`` 1."""

    text: str

    @classmethod
    def read(cls, text: str) -> Number:
        """The number of a JSON text."""
        number = cls(text)
        number.text = text
        return number


Numbered = Iterator[tuple[int, dict[str, Any] | RowError]]


@dataclass(frozen=True)
class Opened:
    """A file's rows."""

    columns: list[str]
    """Empty where only the rows tell."""
    rows: Numbered
    unit: str = "row"
    """What a row is called: ``row`` or ``line``."""


def kind_of(path: Path) -> str | None:
    """``jsonl``, ``json``, ``csv``, ``parquet`` or ``arrow`` by a file's ending; None: unknown."""
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    kind = SUFFIXES.get(Path(plain).suffix)
    return None if plain != name and kind in ("parquet", "arrow") else kind


def set_name(path: Path) -> str:
    """A set's name: ``gsm8k`` for gsm8k.jsonl, ``train`` for train.verl.parquet; a folder's own."""
    return path.name if path.is_dir() else path.name.split(".", 1)[0] or path.name


def files_of(path: Path) -> list[Path]:
    """The files of a problem set, sorted by name."""
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if kind_of(path) is None:
        raise InputError(
            f"{path}: unknown kind of file {path.suffix!r}; known are {', '.join(SUFFIXES)}, and"
            " .gz after the text formats"
        )
    return [path]


def _folder(path: Path) -> list[Path]:
    if (path / "dataset_dict.json").exists():  # datasets.DatasetDict.save_to_disk
        splits = sorted(file.parent for file in path.glob("*/state.json"))
        if len(splits) != 1:
            names = ", ".join(split.name for split in splits) or "none"
            raise InputError(f"{path}: a saved dataset with the splits {names}; give one's folder")
        return _folder(splits[0])
    if (path / "state.json").exists():  # datasets.Dataset.save_to_disk; caches lie there too
        state = _parse_file(path / "state.json")
        listed = state.get("_data_files") if isinstance(state, dict) else None
        if isinstance(listed, list) and listed:
            return [path / str(entry["filename"]) for entry in listed]
    found: list[Path] = []
    for pattern in ("*", "**/*"):
        found = sorted(
            file
            for file in path.glob(pattern)
            if kind_of(file) and file.name not in _ABOUT and file.is_file()
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if found:
            break
    kinds = {str(kind_of(file)) for file in found}
    if "parquet" in kinds:
        found, kinds = [file for file in found if kind_of(file) == "parquet"], {"parquet"}
    if not found:
        known = ", ".join(SUFFIXES)
        raise InputError(f"{path}: no file of problems in this folder; known are {known}")
    if len(kinds) > 1:
        raise InputError(f"{path}: holds {' and '.join(sorted(kinds))} files; give one of them")
    parts = {part for file in found for part in file.relative_to(path).parts}
    heads = sorted({match[1].lower() for part in parts if (match := _SPLIT.match(part))})
    if len(heads) > 1:
        raise InputError(f"{path}: holds the splits {', '.join(heads)}; give one's folder or file")
    return found


def open_file(file: Path, *, whole: bool = False) -> Opened:
    """A file's columns and rows; ``whole``: also the long columns of Parquet and Arrow files
    (:data:`LEFT_OUT`)."""
    if not file.exists():
        raise InputError(f"{file}: no such file")
    if file.stat().st_size == 0:
        raise InputError(f"{file}: the file is empty")
    kind = kind_of(file)
    if kind == "parquet":
        return _open_parquet(file, whole)
    if kind == "arrow":
        return _open_arrow(file, whole)
    if kind == "csv":
        return _open_csv(file)
    if kind == "json":
        try:
            data = _read_json(file)
        except RowError as error:
            return Opened([], iter([(1, error)]))
        if data is not None:
            return Opened([], _objects(data))
    return Opened([], _json_lines(file), "line")


def _unreadable(file: Path, kind: str, error: BaseException) -> InputError:
    why = first_line(error)
    return InputError(f"{file}: not a readable {kind} file (truncated or damaged?): {why}")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """A text file's bytes, unpacked where it ends in ``.gz``."""
    if file.suffix.lower() != ".gz":
        with file.open("rb") as handle:
            yield handle
        return
    try:
        with gzip.open(file, "rb") as unpacked:
            yield cast(IO[bytes], unpacked)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _unreadable(file, "gzip", error) from error


# --- Parquet and Arrow ------------------------------------------------------------------------


def _wanted(columns: Iterable[str]) -> list[str]:
    """The columns worth reading: without bulky ones, but ``messages`` may be the question."""
    columns = list(columns)
    others = {"prompt", "problem", "question", "query"} & {name.lower() for name in columns}
    bulky = LEFT_OUT if others else LEFT_OUT - {"messages"}
    return [name for name in columns if name not in bulky]


def _rows_of(data: pl.DataFrame, first: int) -> Numbered:
    import polars as pl

    # By way of text: 0.1 as 32 bits is 0.1, and not 0.10000000149011612.
    short = pl.col(pl.Float32).cast(pl.String).cast(pl.Float64)
    yield from enumerate(data.with_columns(short).iter_rows(named=True), first)


def _open_parquet(file: Path, whole: bool) -> Opened:
    import polars as pl

    try:
        scan = pl.scan_parquet(file, glob=False)
        columns = scan.collect_schema().names()
        height = scan.select(pl.len()).collect().item()
    except Exception as error:  # polars raises several kinds on a damaged file
        raise _unreadable(file, "Parquet", error) from error
    wanted, size = (columns, _WHOLE_ROWS_READ) if whole else (_wanted(columns), _ROWS_READ)

    def rows() -> Numbered:
        for offset in range(0, height, size):
            try:
                part = scan.select(wanted).slice(offset, size).collect()
            except Exception as error:
                raise _unreadable(file, "Parquet", error) from error
            yield from _rows_of(part, offset + 1)

    return Opened(columns, rows())


def _open_arrow(file: Path, whole: bool) -> Opened:
    """An Arrow file: a stream, as Hugging Face's datasets saves them, or with the file's footer."""
    import polars as pl

    try:
        with file.open("rb") as handle:
            with_footer = handle.read(6) == b"ARROW1"
        data = pl.read_ipc(file) if with_footer else pl.read_ipc_stream(file)
    except Exception as error:
        raise _unreadable(file, "Arrow", error) from error
    wanted = data.columns if whole else _wanted(data.columns)
    return Opened(data.columns, _rows_of(data.select(wanted), 1))


# --- CSV --------------------------------------------------------------------------------------


def _open_csv(file: Path) -> Opened:
    rows = _csv_rows(file)
    try:
        _, header = next(rows)
    except StopIteration:
        raise InputError(f"{file}: no rows in this file") from None
    if isinstance(header, RowError):
        raise InputError(f"{file}: the header is {header}")
    names = [name.strip() for name in header]
    for name in names:
        if name and names.count(name) > 1:
            raise InputError(f"{file}: column {name} stands twice in the header")

    def named() -> Numbered:
        for number, fields in rows:
            if isinstance(fields, RowError):
                yield number, fields
            elif len(fields) != len(names):
                yield number, RowError(f"{len(fields)} fields, where the header has {len(names)}")
            else:
                pairs = zip(names, fields, strict=True)
                yield number, {name: value or None for name, value in pairs if name}

    return Opened([name for name in names if name], named())


def _csv_rows(file: Path) -> Iterator[tuple[int, list[str] | RowError]]:
    """The header as row 0, and the rows; the separator is what cuts the header into most names."""
    csv.field_size_limit(2**31 - 1)  # a solution may be longer than csv's 128 KiB
    with _opened(file) as raw:
        text = io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
        line = text.readline()
        separators = "\t" if ".tsv" in file.suffixes[-2:] else ",;\t"
        cut = max(separators, key=lambda one: len(next(csv.reader([line], delimiter=one))))
        reader = csv.reader(itertools.chain([line], text), delimiter=cut, strict=True)
        number = 0
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, RowError(f"not readable as CSV: {error}")
                number += 1
                continue
            if not fields:  # a blank line
                continue
            if any(_NOT_UTF8.search(field) for field in fields):
                yield number, RowError("not UTF-8; save the file as UTF-8")
            else:
                yield number, fields
            number += 1


# --- JSON -------------------------------------------------------------------------------------


def parse_json(text: str) -> Any:
    """JSON with numbers that keep their texts (:class:`Number`).

    Raises:
        ValueError: not JSON (``json.JSONDecodeError``), or an integer that is too long.
        RecursionError: nested too deeply.
    """
    return json.loads(text, parse_float=Number.read)


def _parse_file(file: Path) -> Any:
    """A JSON file that is not the problems themselves; None where it cannot be read."""
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _read_json(file: Path) -> list[Any] | None:
    """The rows of a JSON file; None where it is JSON lines under another name.

    Raises:
        RowError: a file that is one object, as in a folder of such, is broken.
        InputError: any other is.
    """
    with _opened(file) as handle:
        raw = handle.read()
    broken = False
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        broken, text = True, raw.decode("utf-8-sig", errors="surrogateescape")
    fault: type[RowError | InputError] = RowError if text.lstrip().startswith("{") else InputError
    where = "" if fault is RowError else f"{file}, "
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise fault(f"{where}line {error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise fault(f"{where}{_line_of_long_number(raw)}{_LONG_NUMBER}") from None
    except RecursionError:
        raise fault(f"{where}JSON nested too deeply") from None
    rows = _rows_in(file, data)
    if not broken:
        return rows
    return [
        RowError("not UTF-8") if _NOT_UTF8.search(json.dumps(row, ensure_ascii=False)) else row
        for row in rows
    ]


def _rows_in(file: Path, data: Any) -> list[Any]:
    """The problems in a JSON file: its list, an object's only list of objects, or one object."""
    if isinstance(data, dict):
        asks = {"prompt", "problem", "question", "query", "messages", "conversations"}
        if asks & {str(name).lower() for name in data}:
            return [data]
        lists = [value for value in data.values() if isinstance(value, list)]
        if not lists:
            return [data]
        if len(lists) > 1:
            raise InputError(
                f"{file}: an object with {len(lists)} lists; expected a list of problems, or an"
                " object with one list"
            )
        data = lists[0]
    if not isinstance(data, list):
        raise InputError(f"{file}: expected a list of problems, found {kind_name(data)}")
    return data


def _line_of_long_number(raw: bytes) -> str:
    """``line N: `` of an integer too long to be read, where one is found."""
    digits = re.compile(rb"(?:^|[\s:,\[])-?\d{%d,}" % (sys.get_int_max_str_digits() + 1))
    for number, line in enumerate(raw.splitlines(), 1):
        if digits.search(line):
            return f"line {number}: "
    return ""


def _objects(data: Iterable[Any]) -> Numbered:
    for number, row in enumerate(data, 1):
        chat = isinstance(row, list) and row and all(isinstance(m, dict) for m in row)
        if chat and all("from" in message for message in row):  # a row that is the chat itself
            yield number, {"conversations": row}
        else:
            yield number, row if isinstance(row, (dict, RowError)) else _no_object(row)


def _no_object(row: Any) -> RowError:
    return RowError(f"expected an object, found {kind_name(row)}")


def _json_lines(file: Path) -> Numbered:
    """Rows with their line numbers; read line by line, so a large file needs little memory."""
    with _opened(file) as lines:
        for number, raw in enumerate(lines, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, _json_line(raw)


def _json_line(raw: bytes) -> dict[str, Any] | RowError:
    try:
        row = parse_json(raw.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error.reason}")
    except json.JSONDecodeError as error:
        return RowError(f"not valid JSON: {error.msg} at column {error.colno}")
    except ValueError:  # Python's limit on the digits of an integer
        return RowError(_LONG_NUMBER)
    except RecursionError:
        return RowError("JSON nested too deeply")
    return row if isinstance(row, dict) else _no_object(row)


def kind_name(value: Any) -> str:
    """What a value is, in words for messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, bool):
        return "true or false"
    names = {list: "a list", str: "text", int: "a number", float: "a number", Number: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
