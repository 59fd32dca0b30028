"""A problem set as the ``problems`` table: its rows read, repeats dropped, gold answers checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.formats import FORMATS, check_columns, check_fields, detect
from exgrpo_cli.problems.readers import Numbered, RowError, files_of, open_file, set_name
from exgrpo_cli.problems.rows import Problem, Reading, convert
from exgrpo_cli.problems.values import NoGoldError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.verifiers import allowed_verifier, check_verifier, takes_metadata

if TYPE_CHECKING:
    import polars as pl

_PEEKED = 20  # rows that detection looks at
_NAMED = 3  # rows left out that are named
_LISTED = 20  # files that the report names; MATH has 7,500
_NUMBER = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
# Golds that need no check, by verifier: whole sets (AIME, DAPO, GSM8K, MMLU) are such.
_SURE = {
    "math": _NUMBER,
    "numeric": _NUMBER,
    "choice": re.compile("[A-J]"),
    "exact": re.compile(r".*\S.*", re.DOTALL),
}


@dataclass(frozen=True)
class Imported:
    """A problem set as read."""

    frame: pl.DataFrame
    """The ``problems`` table."""
    report: dict[str, Any]
    """What happened, JSON-able: ``files`` (the first 20) and ``file_count``, ``format``, ``ids``
    (where problem_id comes from), ``rows`` read, ``problems`` kept, ``bad`` and ``without_gold``
    (how many rows were left out because they cannot be read, or have no gold answer) with
    ``left_out`` (the first three of each: ``file``, ``row``, ``why``), ``duplicates`` dropped,
    ``elsewhere`` (how many were left out because another set has the question),
    ``conflicts`` (duplicates whose gold answer differs from the kept one's), ``sources`` (problems
    by source), and ``gold_faults``: the gold answers that their verifier cannot judge against, each
    with ``file``, ``row``, ``problem_id``, ``answer``, ``verifier`` and ``why``."""


@dataclass
class _Rows:
    """What has been read so far."""

    kept: list[Problem] = field(default_factory=list)
    first: dict[bytes, int] = field(default_factory=dict)
    others: Set[bytes] = frozenset()
    """The questions of another set, which are not taken."""
    rows: int = 0
    elsewhere: int = 0
    duplicates: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)
    without_gold: list[dict[str, Any]] = field(default_factory=list)

    def add(self, problem: Problem, dedupe: bool) -> None:
        key = _question_key(problem.prompt)
        if key in self.others:
            self.elsewhere += 1
            return
        if not dedupe or key not in self.first:
            self.first.setdefault(key, len(self.kept))
            self.kept.append(problem)
            return
        self.duplicates += 1
        other = self.kept[self.first[key]]
        if other.golds != problem.golds:
            self.conflicts.append(
                {
                    "file": problem.file,
                    "row": problem.row,
                    "answer": problem.golds[0],
                    "kept_row": other.row,
                    "kept_answer": other.golds[0],
                }
            )


def import_problems(
    path: Path,
    fmt: str = "auto",
    verifier: str = "math",
    source: str | None = None,
    limit: int | None = None,
    dedupe: bool = True,
    log: Log = quiet,
    *,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    timeout: float = 5.0,
    made: Callable[[], Sequence[Problem]] | None = None,
    without: Path | None = None,
) -> Imported:
    """Read a problem set.

    ``problem_id`` is the set's own id where every problem has one and no two the same, and
    otherwise the first 16 hexadecimal digits of BLAKE2b over the prompt as JSON. It does not depend
    on ``limit``: the whole set is always read.

    Args:
        path: a file or folder, see :mod:`exgrpo_cli.problems.readers`.
        fmt: a name in :data:`FORMATS`, or ``auto``.
        verifier: for problems that name none: ``math``, ``choice``, ``exact``, ``numeric`` or
            ``path.py:function``; also the only function that rows may name.
        source: the set's name, for rows that name none; by default the file's name.
        limit: only the first so many problems.
        dedupe: keep only the first of rows with the same question (white space aside).
        columns: the set's column for a field, where detection fails: ``question``, ``answer``,
            ``options``, ``id``, ``source``, ``verifier``.
        skip_bad: leave out rows that cannot be read, and count them.
        workers: processes that check the gold answers; by default as many as cores.
        timeout: hard limit for checking one gold answer, seconds.
        made: makes the problems; no file is read then.
        without: a problems table whose questions are left out, and counted.

    Raises:
        InputError: naming file and row or column: an unknown schema, a missing column, a wrong
            type, an empty or damaged file, a problem without question; no problem left.
    """
    if fmt != "auto" and fmt not in FORMATS:
        raise InputError(f"unknown format {fmt!r}; known are auto, {', '.join(FORMATS)}")
    check_verifier(verifier)
    told = dict(columns or {})
    check_fields(told)
    files = files_of(path) if made is None else []
    if made is not None:
        fmt = "reasoning_gym"
    how = Reading(fmt, verifier, source or set_name(path), told, detected=fmt == "auto")
    read = _Rows(others=_questions_in(without))
    for file in files:
        how = _read_file(file, how, read, dedupe, skip_bad, log)
    for problem in made() if made is not None else ():
        read.rows += 1
        read.add(replace(problem, source=source or problem.source), dedupe)
    _say_left_out(path, read, log)
    kept = read.kept
    if not kept and read.elsewhere:
        raise InputError(f"{path}: all its questions are in {without}; no problem is left")
    if not kept:
        first = (read.bad + read.without_gold)[0]
        raise InputError(
            f"{first['file']}, row {first['row']}: {first['why']}; no problem is left of"
            f" {read.rows} rows"
        )
    identifiers, origin = _identifiers(kept, required=how.fmt == "problems")
    if limit is not None:
        kept, identifiers = kept[:limit], identifiers[:limit]
    data = tables.frame(
        "problems",
        (
            {
                "problem_id": identifier,
                "prompt": p.prompt,
                "answer": p.golds[0],
                "verifier": p.verifier,
                "source": p.source,
                "metadata": p.metadata,
            }
            for identifier, p in zip(identifiers, kept, strict=True)
        ),
    )
    others = f", left out {read.elsewhere} that are in {without}" if without else ""
    log(
        f"{path}: read {read.rows} rows ({how.fmt}), kept {len(kept)} problems,"
        f" dropped {read.duplicates} duplicates{others}; ids from {origin}"
    )
    if read.conflicts:
        one = read.conflicts[0]
        log(
            f"{path}: {len(read.conflicts)} duplicates have another gold answer than the one kept"
            f" (row {one['row']} {one['answer']!r}, row {one['kept_row']} {one['kept_answer']!r})"
        )
    faults = _gold_faults(kept, identifiers, str(path), log, workers, timeout)
    return Imported(
        data,
        {
            "files": [str(file) for file in files[:_LISTED]],
            "file_count": len(files),
            "format": how.fmt,
            "ids": origin,
            "rows": read.rows,
            "problems": len(kept),
            "bad": len(read.bad),
            "without_gold": len(read.without_gold),
            "left_out": read.bad[:_NAMED] + read.without_gold[:_NAMED],
            "duplicates": read.duplicates,
            "elsewhere": read.elsewhere,
            "conflicts": read.conflicts,
            "sources": dict(Counter(p.source for p in kept)),
            "gold_faults": faults,
        },
    )


def _read_file(
    file: Path, how: Reading, read: _Rows, dedupe: bool, skip_bad: bool, log: Log
) -> Reading:
    """Read one file's rows; the first file's format, where it is found, is all others' too."""
    opened = open_file(file)
    peeked, good = _peek(opened.rows)
    if not peeked:
        raise InputError(f"{file}: no rows in this file")
    if good:
        columns = opened.columns or list(dict.fromkeys(name for row in good for name in row))
        if how.fmt == "auto":
            found, *others = detect(file, columns, good, how.told)
            how = replace(how, fmt=found)
            fit = ", ".join(other for other in others if other != "plain")
            if fit:
                log(f"{file}: read as {found}; {fit} would fit too, and --format tells it")
        check_columns(file, columns, how.fmt, how.told)
    for number, row in itertools.chain(peeked, opened.rows):
        read.rows += 1
        where = f"{file}, {opened.unit} {number}"
        place = {"file": str(file), "row": number}
        try:
            if isinstance(row, RowError):
                raise row
            problem = convert(str(file), number, row, how)
            if problem.verifier != how.verifier:
                allowed_verifier(problem.verifier, [how.verifier], where)
                check_verifier(problem.verifier)
        except NoGoldError as error:
            read.without_gold.append(place | {"why": str(error)})
            continue
        except (RowError, InputError) as error:
            why = str(error).removeprefix(f"{where}: ")
            if not skip_bad:
                raise InputError(f"{where}: {why}") from None
            read.bad.append(place | {"why": why})
            continue
        read.add(problem, dedupe)
    return how


def _peek(rows: Numbered) -> tuple[list[tuple[int, Any]], list[Mapping[str, Any]]]:
    """The first rows, and of these those that can be read."""
    peeked: list[tuple[int, Any]] = []
    good: list[Mapping[str, Any]] = []
    for number, row in rows:
        peeked.append((number, row))
        if not isinstance(row, RowError):
            good.append(row)
        if len(good) == _PEEKED:
            break
    return peeked, good


def _say_left_out(path: Path, read: _Rows, log: Log) -> None:
    for what, rows in (
        ("rows that cannot be read", read.bad),
        ("rows without a gold answer", read.without_gold),
    ):
        if rows:
            first = "; ".join(
                f"{row['file']} row {row['row']}: {row['why']}" for row in rows[:_NAMED]
            )
            log(f"{path}: left out {len(rows)} {what}; the first: {first}")


# --- ids, duplicates, gold answers --------------------------------------------------------------


def _question_key(prompt: Sequence[Mapping[str, str]]) -> bytes:
    parts = [part for m in prompt for part in (m["role"], " ".join(m["content"].split()))]
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).digest()


def _questions_in(table: Path | None) -> Set[bytes]:
    """The questions of a problems table."""
    if table is None:
        return frozenset()
    prompts = tables.read_table("problems", table, ["prompt"])["prompt"]
    return {_question_key(prompt) for prompt in prompts}


def _identifiers(problems: Sequence[Problem], required: bool) -> tuple[list[str], str]:
    """A unique id a problem, and where they come from (``own ids`` or ``the prompts' hashes``)."""
    given = [p.own_id for p in problems if p.own_id is not None]
    if len(given) == len(problems) == len(set(given)):
        return given, "the set's own"
    if required:
        seen: dict[str | None, int] = {}
        for p in problems:
            if p.own_id is None or p.own_id in seen:
                what = f"is also in row {seen[p.own_id]}" if p.own_id in seen else "is missing"
                raise InputError(f"{p.file}, row {p.row}: problem_id {p.own_id!r} {what}")
            seen[p.own_id] = p.row
    counts: Counter[str] = Counter()
    hashed = []
    for p in problems:
        text = json.dumps(p.prompt, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        counts[name] += 1
        hashed.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return hashed, "the prompts' hashes"


def _metadata(problem: Problem) -> dict[str, Any] | None:
    """What its verifier is told of it; None where that is nothing, or no JSON object."""
    if problem.metadata is None or not takes_metadata(problem.verifier):
        return None
    try:
        values = json.loads(problem.metadata)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _gold_faults(
    problems: Sequence[Problem],
    identifiers: Sequence[str],
    origin: str,
    log: Log,
    workers: int | None,
    timeout: float,
) -> list[dict[str, Any]]:
    """The gold answers that their verifiers cannot judge against; checked in worker processes."""
    from exgrpo_cli.verifiers.pool import Job, Pool

    rows = [
        (index, Job(p.verifier, gold, None, metadata=_metadata(p)))
        for index, p in enumerate(problems)
        for gold in p.golds
        if not (p.verifier in _SURE and _SURE[p.verifier].fullmatch(gold))
    ]
    faults = []
    size = 5000
    with Pool(workers, timeout) as pool:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            whys = pool.check_golds([job for _, job in part])
            for (index, job), why in zip(part, whys, strict=True):
                if why is not None:
                    faults.append(
                        {
                            "file": problems[index].file,
                            "row": problems[index].row,
                            "problem_id": identifiers[index],
                            "answer": job.answer,
                            "verifier": job.verifier,
                            "why": why,
                        }
                    )
            if len(rows) > size:
                log(f"{origin}: checked {min(start + size, len(rows))} of {len(rows)} gold answers")
    if faults:
        one = faults[0]
        log(
            f"{origin}: {len(faults)} gold answers that their verifier cannot read, or only as"
            f" text; the first: row {one['row']}, {str(one['answer'])[:80]!r} ({one['verifier']}):"
            f" {one['why']}"
        )
    return faults
