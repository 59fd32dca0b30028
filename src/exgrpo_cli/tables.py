"""The tables between the stages: schemas, checked reading, atomic writing, parts and shards.

Every file is Parquet with zstd. A file is written under a temporary name in its own folder,
fsynced and renamed, so a file that exists is complete. A stage's work for one step is cut into
numbered *parts*, ``part-00003-of-00016.parquet``; how many there are follows from the plan and the
recipe alone. A shard ``I/N`` does the parts whose number is I modulo N, so any number of array
tasks, in any order, produces the same files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError

if TYPE_CHECKING:
    import polars as pl

# A column is (type, nullable, meaning). Types are written in DuckDB's words.
Column = tuple[str, bool, str]

SCHEMAS: dict[str, dict[str, Column]] = {
    "problems": {
        "problem_id": ("VARCHAR", False, "key: the data set's own id, or a hash of the prompt"),
        "prompt": ("STRUCT(role VARCHAR, content VARCHAR)[]", False, "the chat, without answer"),
        "answer": ("VARCHAR", False, "the gold answer"),
        "verifier": ("VARCHAR", False, "math, choice, exact, numeric, or path.py:function"),
        "source": ("VARCHAR", False, "the data set's name; evaluation is reported by it"),
        "metadata": ("VARCHAR", True, "whatever else the row held, as JSON"),
    },
    "plan": {
        "step": ("INTEGER", False, "key: the step these questions are for"),
        "problem_id": ("VARCHAR", False, "key"),
        "role": ("VARCHAR", False, "fresh or replay"),
        "samples": ("INTEGER", False, "rollouts to sample: K for fresh, K - 1 for replay"),
        "successes": ("INTEGER", True, "the question's bucket when it was planned"),
        "attempts": ("INTEGER", True, "out of how many"),
    },
    "rollouts": {
        "rollout_id": ("VARCHAR", False, "key: s00007/PROBLEM_ID/03"),
        "step": ("INTEGER", False, "the step t of the policy that sampled it"),
        "problem_id": ("VARCHAR", False, "the question"),
        "sample": ("INTEGER", False, "0..K-1; 0 is the replayed trajectory of a replay group"),
        "role": ("VARCHAR", False, "fresh or replay: the role of its question in this step"),
        "policy": ("VARCHAR", False, "the policy's name, such as step-00007"),
        "prompt_ids": ("INTEGER[]", False, "prompt token ids"),
        "token_ids": ("INTEGER[]", False, "response token ids, the end token included"),
        "text": ("VARCHAR", False, "the response for reading; never tokenised again"),
        "logprobs": ("FLOAT[]", False, "nats, of the distribution that was sampled"),
        "entropies": ("FLOAT[]", True, "nats a token; null where the engine has none"),
        "mean_entropy": ("FLOAT", False, "mean over the response tokens, nats"),
        "entropy_source": ("VARCHAR", False, "engine (exact), topk or logprobs (estimates)"),
        "mean_logprob": ("FLOAT", False, "mean over the response tokens, nats"),
        "tokens": ("INTEGER", False, "length of the response"),
        "token_hash": ("VARCHAR", False, "hash of token_ids: equal ids, equal hash"),
        "finish_reason": ("VARCHAR", False, "stop, or length where it was cut off"),
        "seed": ("BIGINT", False, "the seed of this row's sampling"),
    },
    "verdicts": {
        "rollout_id": ("VARCHAR", False, "key"),
        "reward": ("FLOAT", False, "0 or 1; other values only where reward options are set"),
        "correct": ("BOOLEAN", False, "whether the answer is right: this makes buckets"),
        "extracted": ("VARCHAR", True, "the answer, or with extract = whole the text with it"),
        "status": ("VARCHAR", False, "ok, no_answer, no_format, unparsable, timeout, error"),
        "verifier": ("VARCHAR", False, "which verifier judged"),
        "seconds": ("FLOAT", False, "time in the worker; 0 for a repeated answer"),
    },
    "scores": {
        "rollout_id": ("VARCHAR", False, "key: the scored trajectory"),
        "policy": ("VARCHAR", False, "key: the policy that scored it"),
        "step": ("INTEGER", False, "the step it was scored for"),
        "logprobs": ("FLOAT[]", False, "exact log-probabilities of the response tokens, nats"),
        "entropies": ("FLOAT[]", False, "exact entropies over the whole vocabulary, nats"),
        "mean_entropy": ("FLOAT", False, "mean over the response tokens, nats"),
        "mean_logprob": ("FLOAT", False, "mean over the response tokens, nats"),
    },
    # An index: token lists stay in the rollouts, where `part` says, and are read for chosen rows
    # only. So a step's curation writes megabytes, not the whole history of tokens.
    "experience": {
        "rollout_id": ("VARCHAR", False, "key: a stored success"),
        "problem_id": ("VARCHAR", False, "its question"),
        "step": ("INTEGER", False, "when it was collected"),
        "sample": ("INTEGER", False, "its number in the group"),
        "tokens": ("INTEGER", False, "length of the response"),
        "token_hash": ("VARCHAR", False, "equal ids of a question enter once"),
        "reward": ("FLOAT", False, "as judged when it was collected"),
        "mean_entropy": ("FLOAT", False, "mean entropy when it was collected"),
        "mean_logprob": ("FLOAT", False, "mean log-probability when it was collected"),
        "entropy_source": ("VARCHAR", False, "score or engine (exact), topk or logprobs"),
        "entropy_policy": ("VARCHAR", False, "under which policy"),
        "part": ("VARCHAR", False, "the rollouts file that holds its token lists"),
    },
    "questions": {
        "problem_id": ("VARCHAR", False, "key: every question seen so far"),
        "successes": ("INTEGER", True, "k of the bucket, the replayed row counted"),
        "attempts": ("INTEGER", True, "n of the bucket, the replayed row counted"),
        "fresh_successes": ("INTEGER", True, "k without the replayed row"),
        "fresh_attempts": ("INTEGER", True, "n without the replayed row"),
        "bucket": ("VARCHAR", True, "easy, medium or hard; null before the first stored success"),
        "last_step": ("INTEGER", False, "the last step it was sampled in"),
        "times_replayed": ("INTEGER", False, "steps in which it was a replay question"),
        "retired_step": ("INTEGER", True, "when all of its samples succeeded"),
        "epoch": ("INTEGER", True, "the last epoch in which it was drawn fresh"),
    },
    "curated": {
        "step": ("INTEGER", False, "key: the step that replays it"),
        "problem_id": ("VARCHAR", False, "key"),
        "rollout_id": ("VARCHAR", False, "the chosen trajectory"),
        "collected_step": ("INTEGER", False, "when it was collected; step minus this is its age"),
        "prompt_ids": ("INTEGER[]", False, "prompt token ids"),
        "token_ids": ("INTEGER[]", False, "response token ids, the end token included"),
        "logprobs": ("FLOAT[]", False, "as recorded at collection: log pi_past, nats"),
        "logprob_source": ("VARCHAR", False, "score, or engine where no scores were made"),
        "reward": ("FLOAT", False, "as judged when it was collected"),
        "mean_entropy": ("FLOAT", False, "what it was chosen by, nats"),
        "entropy_source": ("VARCHAR", False, "score or engine (exact), topk or logprobs"),
        "entropy_policy": ("VARCHAR", False, "under which policy; another than pi_t is stale"),
        "bucket": ("VARCHAR", True, "easy, medium or hard"),
        "successes": ("INTEGER", True, "k of the bucket"),
        "attempts": ("INTEGER", True, "n of the bucket"),
        "rank": ("INTEGER", False, "1 for the best of its candidates"),
        "candidates": ("INTEGER", False, "stored successes of the question"),
    },
}
"""Every table: its columns in order, each with type, nullability and meaning."""

# Lists of one row that must be equally long, by table.
_EQUAL_LENGTHS: dict[str, tuple[str, ...]] = {
    "rollouts": ("token_ids", "logprobs", "entropies"),
    "scores": ("logprobs", "entropies"),
    "curated": ("token_ids", "logprobs"),
}


def polars_schema(table: str) -> dict[str, pl.DataType]:
    """The table's schema as polars types, in column order."""
    import polars as pl

    scalar: dict[str, Any] = {
        "VARCHAR": pl.String(),
        "INTEGER": pl.Int32(),
        "BIGINT": pl.Int64(),
        "FLOAT": pl.Float32(),
        "BOOLEAN": pl.Boolean(),
        "INTEGER[]": pl.List(pl.Int32()),
        "FLOAT[]": pl.List(pl.Float32()),
        "STRUCT(role VARCHAR, content VARCHAR)[]": pl.List(
            pl.Struct({"role": pl.String(), "content": pl.String()})
        ),
    }
    return {name: scalar[kind] for name, (kind, _, _) in SCHEMAS[table].items()}


def frame(table: str, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows as a frame with exactly the table's columns and types; a missing nullable is null."""
    import polars as pl

    schema = polars_schema(table)
    rows = list(rows)  # by columns: polars takes lists of tokens several times faster so
    return pl.DataFrame({c: [row.get(c) for row in rows] for c in schema}, schema=schema)


# --- writing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in ``path``'s folder that becomes ``path`` when the block succeeds.

    The file is fsynced before the rename and its folder after it (so a power cut leaves the old
    file or the new one). When the block fails, nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    temporary.chmod(0o666 & ~umask())
    try:
        with _full_disk_named(path):
            yield temporary
            fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that becomes ``path`` when the block succeeds.

    All files in it are fsynced first. What lay at ``path`` is replaced. What an earlier, killed
    writer of the same folder left behind is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    temporary.chmod(path.parent.stat().st_mode & 0o777)
    try:
        with _full_disk_named(path):
            yield temporary
        mask = umask()
        for folder, _, files in os.walk(temporary):
            for name in files:
                # safetensors writes for its owner alone; others on a cluster read policies too.
                (Path(folder) / name).chmod(0o666 & ~mask)
                fsync(Path(folder) / name)
            fsync(Path(folder))
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """A full disk or quota as an OSError that names the file.

    Python's own has no name, and polars and safetensors raise errors of their own.
    """
    try:
        yield
    except Exception as error:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise


def umask() -> int:
    """The process's umask (reading it means setting it for a moment)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def fsync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_table(table: str, data: pl.DataFrame, path: Path) -> None:
    """Write a whole table file atomically, with exactly the schema's columns in order.

    Raises:
        InputError: a column is missing, of another type, or null where it may not be.
    """
    check_frame(table, data, path)
    with atomic_path(path) as temporary:
        data.select(list(SCHEMAS[table])).write_parquet(temporary, compression="zstd")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (UTF-8)."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def finite_or_none(value: Any) -> Any:
    """A value as JSON can have it: a float that is not finite becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- reading ---------------------------------------------------------------------------------


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files of a table: the file itself, or those in the folder, sorted by name.

    Raises:
        InputError: nothing is there, or the folder holds no Parquet file.
    """
    if path.is_dir():
        files = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
        if not files:
            raise InputError(f"{path}: no .parquet file in this folder")
        return files
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    return [path]


def literal_path(path: Path) -> str:
    """A file name for DuckDB's ``read_parquet``, which takes brackets and stars for patterns."""
    return re.sub(r"([\[*?])", r"[\1]", str(path))


def read_table(
    table: str, paths: Path | Sequence[Path], columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """Read and check a table (a file, a folder of parts, or several of either).

    Args:
        table: a name in :data:`SCHEMAS`.
        paths: where it lies.
        columns: only these (and only these are read from disk); all by default.

    Raises:
        InputError: no such file, not Parquet, a missing column, another type, a null where none
            may be, or lists of unequal lengths in a row.
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
        check_frame(table, part, file, wanted)
        frames.append(part.select(wanted).cast({c: polars_schema(table)[c] for c in wanted}))
    if not frames:
        schema = polars_schema(table)
        return pl.DataFrame(schema={c: schema[c] for c in wanted})
    return pl.concat(frames, rechunk=False)


def _damaged(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{path}: not a readable Parquet file (truncated or damaged?): {reason}"


def check_columns(table: str, path: Path, columns: Sequence[str] | None = None) -> None:
    """Check a file's columns against the schema by its footer alone.

    Raises:
        InputError: naming the file, the column, what was found and what was expected.
    """
    import polars as pl

    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty; expected a Parquet table of {table}")
        with path.open("rb") as handle:  # by handle: polars takes brackets in names for patterns
            found = pl.read_parquet_schema(handle)
    except InputError:
        raise
    except Exception as error:
        raise InputError(_damaged(path, error)) from error
    expected = polars_schema(table)
    for name in columns if columns is not None else SCHEMAS[table]:
        if name not in found:
            raise InputError(
                f"{path}: column {name} is missing; a {table} table needs {name}"
                f" {SCHEMAS[table][name][0]} ({SCHEMAS[table][name][2]})"
            )
        if not _readable_as(found[name], expected[name]):
            raise InputError(
                f"{path}: column {name} is {found[name]}; a {table} table needs"
                f" {SCHEMAS[table][name][0]}"
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


def check_frame(
    table: str, data: pl.DataFrame, path: Path, columns: Sequence[str] | None = None
) -> None:
    """Check a frame that is about to be written, or was just read.

    Raises:
        InputError: a missing column, another type, a null where none may be, a row whose list
            columns are not equally long; the row is named by its number, counted from 1.
    """
    import polars as pl

    expected = polars_schema(table)
    wanted = list(columns) if columns is not None else list(SCHEMAS[table])
    for name in wanted:
        kind, nullable, _ = SCHEMAS[table][name]
        if name not in data.columns:
            raise InputError(f"{path}: column {name} is missing; a {table} table needs {kind}")
        if not _readable_as(data.schema[name], expected[name]):
            raise InputError(
                f"{path}: column {name} is {data.schema[name]}; a {table} table needs {kind}"
            )
        if not nullable and data[name].null_count():
            row = data[name].is_null().arg_max()
            raise InputError(
                f"{path}: column {name} is null in row {(row or 0) + 1}; {table} needs a value"
            )
    lists = [c for c in _EQUAL_LENGTHS.get(table, ()) if c in wanted]
    for other in lists[1:]:
        unequal = data.select(
            (pl.col(lists[0]).list.len() != pl.col(other).list.len()).fill_null(False)
        ).to_series()
        if unequal.any():
            raise InputError(
                f"{path}: row {(unequal.arg_max() or 0) + 1} has {lists[0]} and {other} of"
                " different lengths; the file was not written by this tool, or was changed"
            )


# --- parts, shards, hashes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One of ``count`` workers that share a stage's parts; it does those with number % count."""

    index: int
    count: int

    def has(self, part: int) -> bool:
        """Whether this shard does the part."""
        return part % self.count == self.index


WHOLE = Shard(0, 1)


def parse_shard(text: str | None) -> Shard:
    """``I/N`` (I from 0), or by default SLURM's array variables, or the whole.

    ``SLURM_ARRAY_TASK_MIN`` is subtracted, so ``--array=1-8`` and ``--array=0-7`` are the same.
    An array with gaps (``--array=2,5``, to send two tasks again) does not tell how many tasks share
    the work, so it needs ``--shard``.

    Raises:
        InputError: the text is not I/N with 0 <= I < N, or the array has gaps.
    """
    origin = "--shard"
    if text is None:
        names = ("ID", "COUNT", "MIN", "MAX")
        found = {name: os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names}
        if not found["ID"] or not found["COUNT"]:
            return WHOLE
        if not all(value.isdigit() or not value for value in found.values()):
            raise InputError(f"SLURM_ARRAY_TASK_*: not whole numbers: {found}; give --shard I/N")
        task, count, first = (int(found[name] or 0) for name in ("ID", "COUNT", "MIN"))
        if task - first >= count or (found["MAX"] and int(found["MAX"]) - first + 1 != count):
            raise InputError(
                f"SLURM array task {task} of {count} from {first}: an array with gaps does not tell"
                " how many tasks share the work; give --shard I/N with the first submission's N"
            )
        text, origin = f"{task - first}/{count}", "SLURM_ARRAY_TASK_ID and _COUNT"
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(f"{origin}: {text!r} is not I/N with I counted from 0, such as 0/4 to 3/4")
    return Shard(int(match[1]), int(match[2]))


def part_name(index: int, count: int, prefix: str = "part") -> str:
    """``part-00003-of-00016.parquet``."""
    return f"{prefix}-{index:05d}-of-{count:05d}.parquet"


def part_number(path: Path) -> tuple[int, int]:
    """The ``(index, count)`` in a part's name; ``(0, 1)`` for a file that is not named so."""
    match = re.search(r"-(\d+)-of-(\d+)\.parquet$", path.name)
    return (int(match[1]), int(match[2])) if match else (0, 1)


def require_all_parts(folder: Path, what: str, mend: str) -> list[Path]:
    """The parts in a folder, refused when some are missing.

    Args:
        folder: such as ``rollouts/step-00007``.
        what: the words for the message, such as ``rollouts of step 7``.
        mend: the command that makes the missing ones.

    Raises:
        InputError: nothing there, parts missing, or parts of two different divisions.
    """
    if not folder.exists():
        raise InputError(f"{folder}: no {what} yet; {mend}")
    files = parquet_files(folder)
    counts = sorted({part_number(file)[1] for file in files})
    if len(counts) > 1:
        raise InputError(
            f"{folder}: parts of {counts[0]} and of {counts[-1]} lie together;"
            " remove the stale ones"
        )
    missing = sorted(set(range(counts[0])) - {part_number(file)[0] for file in files})
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {counts[0]} parts are missing (the first is"
            f" {part_name(missing[0], counts[0])}); {mend}"
        )
    return files


def chunked(count: int, size: int) -> list[range]:
    """``count`` items in consecutive ranges of ``size``; at least one range, perhaps empty."""
    return [range(i, min(i + size, count)) for i in range(0, max(count, 1), size)]


def token_hash(token_ids: Sequence[int]) -> str:
    """A hash of token ids: 32 hexadecimal digits of BLAKE2b over little-endian int32."""
    import numpy as np

    raw = np.array(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def row_seed(*parts: object) -> int:
    """A seed in 0..2^62-1 from anything printable: the same parts, the same seed, anywhere."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
