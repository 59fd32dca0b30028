"""Parts and shards of a table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli.errors import InputError


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files of a table: the file itself, or those in the folder, sorted by name."""
    if path.is_dir():
        files = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
        if not files:
            raise InputError(f"{path}: no .parquet file in this folder")
        return files
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    return [path]


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


def divisions(files: Iterable[Path]) -> dict[int, set[int]]:
    """The divisions that parts of one kind belong to: N of ``-of-N`` to the numbers there.

    More than one means that parts of two ways to cut a step lie together.
    """
    found: dict[int, set[int]] = {}
    for index, count in map(part_number, files):
        found.setdefault(count, set()).add(index)
    return found


def require_one_division(
    folder: Path, files: Sequence[Path], mend: str, prefix: str = "part"
) -> None:
    """Refuse parts of one kind of which some are missing."""
    found = divisions(files)
    if len(found) > 1:
        words = "parts" if prefix == "part" else f"{prefix} parts"
        raise InputError(
            f"{folder}: {words} of {min(found)} and of {max(found)} lie together;"
            " remove the stale ones"
        )
    ((count, have),) = found.items()
    missing = sorted(set(range(count)) - have)
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {count} parts are missing (the first is"
            f" {part_name(missing[0], count, prefix)}); {mend}"
        )


def require_all_parts(folder: Path, what: str, mend: str) -> list[Path]:
    """The parts in a folder, of ``what`` (``rollouts of step 7``), refused when some are
    missing."""
    if not folder.exists():
        raise InputError(f"{folder}: no {what} yet; {mend}")
    files = parquet_files(folder)
    require_one_division(folder, files, mend)
    return files


def chunked(count: int, size: int) -> list[range]:
    """``count`` items in consecutive ranges of ``size``; at least one range, perhaps empty."""
    return [range(i, min(i + size, count)) for i in range(0, max(count, 1), size)]
