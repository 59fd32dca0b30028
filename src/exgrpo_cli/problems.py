"""Bringing problem sets into the ``problems`` table, from the formats that users have.

The schema is detected from the columns, or told; see :data:`FORMATS`. Every row becomes a chat
without its answer, a gold answer, a verifier, a source and the rest as metadata.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.verifiers import check_verifier, is_function
from exgrpo_cli.verifiers.extract import last_boxed

if TYPE_CHECKING:
    import polars as pl

FORMATS: dict[str, str] = {
    "problems": "problem_id, prompt, answer, verifier, source",
    "verl": "data_source, prompt (messages), reward_model.ground_truth",
    "dapo": "as verl, with extra_info.index a string",
    "openr1": "problem, answer, uuid, source or generations",
    "gsm8k": "question, answer ending in #### x",
    "math": "problem, solution with \\boxed{x}, or also answer",
    "deepscaler": "problem, answer, solution",
    "chat": "messages, or also answer",
    "plain": "prompt, problem or question (text or messages), and answer or solution",
}
"""The schemas, each with its columns."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    "problems": ("problem_id", "prompt", "answer", "verifier", "source"),
    "verl": ("data_source", "prompt", "reward_model"),
    "dapo": ("data_source", "prompt", "reward_model"),
    "openr1": ("problem", "answer"),
    "gsm8k": ("question", "answer"),
    "math": ("problem", "solution"),
    "deepscaler": ("problem", "answer"),
    "chat": ("messages",),
}
_QUESTION_COLUMNS = ("prompt", "problem", "question")
_ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
_ID_COLUMNS = ("unique_id", "uuid", "problem_id", "id", "question_id")
# Long texts that no verifier needs: other models' responses and what was said about them.
_LEFT_OUT = {
    "generations",
    "messages",
    "target",
    "is_reasoning_complete",
    "correctness_math_verify",
    "correctness_llama",
    "finish_reasons",
}
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_PEEKED = 20  # rows that detection looks at
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")
_LONG_NUMBER = "an integer too long to be read; write it as text, in quotes"


@dataclass(frozen=True)
class Imported:
    """A problem set as read."""

    frame: pl.DataFrame
    """The ``problems`` table."""
    report: dict[str, Any]
    """What happened, JSON-able: ``files``, ``format``, ``ids`` (where problem_id comes from),
    ``rows`` read, ``problems`` kept, ``duplicates`` dropped, ``conflicts`` (duplicates whose gold
    answer differs from the kept one's), ``sources`` (problems by source), and ``gold_faults``: the
    gold answers that their verifier cannot judge against, each with ``file``, ``row``,
    ``problem_id``, ``answer``, ``verifier`` and ``why``."""


@dataclass(frozen=True)
class _Problem:
    file: str
    row: int
    own_id: str | None
    prompt: list[dict[str, str]]
    answer: str
    verifier: str
    source: str
    metadata: str | None


class _RowError(Exception):
    """What is wrong with a row; the caller adds file and row."""


def import_problems(
    path: Path,
    fmt: str = "auto",
    verifier: str = "math",
    source: str | None = None,
    limit: int | None = None,
    dedupe: bool = True,
    log: Callable[[str], None] | None = None,
    *,
    workers: int | None = None,
    timeout: float = 5.0,
) -> Imported:
    """Read a problem set.

    ``problem_id`` is the set's own id where every problem has one and no two the same, and
    otherwise the first 16 hexadecimal digits of BLAKE2b over the prompt as JSON. It does not depend
    on ``limit``: the whole set is always read.

    Args:
        path: JSONL, JSON (a list, or an object with one list), CSV, TSV or Parquet, or a folder of
            Parquet files.
        fmt: a name in :data:`FORMATS`, or ``auto``.
        verifier: for problems that name none: ``math``, ``choice``, ``exact``, ``numeric`` or
            ``path.py:function``.
        source: the set's name, for rows that name none; by default the file's name.
        limit: only the first so many problems.
        dedupe: keep only the first of rows with the same question (white space aside).
        log: takes one-line messages.
        workers: processes that check the gold answers; by default as many as cores.
        timeout: hard limit for checking one gold answer, seconds.

    Raises:
        InputError: naming file and row or column: an unknown schema, a missing column, a wrong
            type, an empty or damaged file, a problem without question or gold answer.
    """
    say = log or (lambda _: None)
    if fmt != "auto" and fmt not in FORMATS:
        raise InputError(f"unknown format {fmt!r}; known are auto, {', '.join(FORMATS)}")
    check_verifier(verifier)
    checked = {verifier}
    files = _files(path)
    name = source or (path.name if path.is_dir() else _stem(path))
    kept: list[_Problem] = []
    first: dict[bytes, int] = {}
    rows = duplicates = 0
    conflicts: list[dict[str, Any]] = []
    found = fmt
    for file in files:
        columns, numbered, unit = _open(file)
        peeked = list(itertools.islice(numbered, _PEEKED))
        if not peeked:
            raise InputError(f"{file}: no rows in this file")
        columns = columns or list(dict.fromkeys(c for _, row in peeked for c in row))
        if found == "auto":
            found = _detect(file, columns, [row for _, row in peeked])
        _check_columns(file, columns, found)
        for number, row in itertools.chain(peeked, numbered):
            try:
                problem = _convert(str(file), number, row, found, verifier, name)
                if problem.verifier not in checked:
                    check_verifier(problem.verifier)
                    checked.add(problem.verifier)
            except (_RowError, InputError) as error:
                raise InputError(f"{file}, {unit} {number}: {error}") from None
            rows += 1
            key = _question_key(problem.prompt)
            if dedupe and key in first:
                duplicates += 1
                other = kept[first[key]]
                if other.answer != problem.answer:
                    conflicts.append(
                        {
                            "file": str(file),
                            "row": number,
                            "answer": problem.answer,
                            "kept_row": other.row,
                            "kept_answer": other.answer,
                        }
                    )
                continue
            first.setdefault(key, len(kept))
            kept.append(problem)
    identifiers, origin = _identifiers(kept, required=found == "problems")
    if limit is not None:
        kept, identifiers = kept[:limit], identifiers[:limit]
    data = tables.frame(
        "problems",
        (
            {
                "problem_id": identifier,
                "prompt": p.prompt,
                "answer": p.answer,
                "verifier": p.verifier,
                "source": p.source,
                "metadata": p.metadata,
            }
            for identifier, p in zip(identifiers, kept, strict=True)
        ),
    )
    say(
        f"{path}: read {rows} rows ({found}), kept {len(kept)} problems,"
        f" dropped {duplicates} duplicates; ids from {origin}"
    )
    if conflicts:
        one = conflicts[0]
        say(
            f"{path}: {len(conflicts)} duplicates have another gold answer than the one kept"
            f" (row {one['row']} {one['answer']!r}, row {one['kept_row']} {one['kept_answer']!r})"
        )
    places = [(p.file, p.row) for p in kept]
    faults = _gold_faults(data, places, str(path), say, workers, timeout)
    counts: dict[str, int] = {}
    for p in kept:
        counts[p.source] = counts.get(p.source, 0) + 1
    return Imported(
        data,
        {
            "files": [str(file) for file in files],
            "format": found,
            "ids": origin,
            "rows": rows,
            "problems": len(kept),
            "duplicates": duplicates,
            "conflicts": conflicts,
            "sources": counts,
            "gold_faults": faults,
        },
    )


def check_problems(
    data: pl.DataFrame,
    origin: Path | str = "problems",
    log: Callable[[str], None] | None = None,
    *,
    workers: int | None = None,
    timeout: float = 5.0,
) -> dict[str, Any]:
    """Check a ``problems`` table: keys, prompts, verifiers, and every gold answer.

    Args:
        data: the table.
        origin: its file, for the messages.
        log: takes one-line messages.
        workers: processes that check the gold answers; by default as many as cores.
        timeout: hard limit for one gold answer, seconds.

    Returns:
        ``problems``, ``sources`` and ``gold_faults`` as in :class:`Imported`.

    Raises:
        InputError: naming the row: columns that do not fit, a repeated or unusable problem_id, an
            empty question or answer, an unknown verifier.
    """
    tables.check_frame("problems", data, Path(origin))
    seen: dict[str, int] = {}
    for number, row in enumerate(data.iter_rows(named=True), 1):
        identifier = row["problem_id"]
        try:
            if not identifier or "/" in identifier:
                raise _RowError(f"problem_id {identifier!r} is empty or has a / in it")
            if identifier in seen:
                raise _RowError(f"problem_id {identifier!r} is also in row {seen[identifier]}")
            seen[identifier] = number
            _messages(row["prompt"], "prompt")
            if not row["answer"].strip():
                raise _RowError("the answer is empty")
        except _RowError as error:
            raise InputError(f"{origin}, row {number}: {error}") from None
    for verifier in data["verifier"].unique(maintain_order=True):
        check_verifier(verifier)
    places = [(str(origin), number) for number in range(1, data.height + 1)]
    say = log or (lambda _: None)
    return {
        "problems": data.height,
        "sources": dict(data["source"].value_counts(sort=True).iter_rows()),
        "gold_faults": _gold_faults(data, places, str(origin), say, workers, timeout),
    }


# --- files ------------------------------------------------------------------------------------

_Numbered = Iterator[tuple[int, dict[str, Any]]]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return tables.parquet_files(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(
            f"{path}: unknown kind of file {path.suffix!r}; known are {', '.join(_SUFFIXES)}"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return [path]


def _stem(path: Path) -> str:
    """``gsm8k`` for gsm8k.jsonl, ``train`` for train.verl.parquet."""
    return path.name.split(".", 1)[0] or path.name


def _open(file: Path) -> tuple[list[str], _Numbered, str]:
    """A file's columns (empty where only its rows tell), its rows, and what a row is called."""
    kind = _SUFFIXES[file.suffix.lower()]
    if kind == "parquet":
        columns, rows = _open_parquet(file)
        return columns, rows, "row"
    if kind == "csv":
        columns, rows = _open_csv(file)
        return columns, rows, "row"
    if kind == "json":
        data = _read_json(file)
        if data is not None:
            return [], _objects(file, data), "row"
    return [], _json_lines(file), "line"


def _open_parquet(file: Path) -> tuple[list[str], _Numbered]:
    import polars as pl

    if file.stat().st_size == 0:
        raise InputError(f"{file}: the file is empty")
    try:
        columns = list(pl.read_parquet_schema(file))
        height = pl.scan_parquet(file).select(pl.len()).collect().item()
    except Exception as error:  # polars raises several kinds on a damaged file
        raise _unreadable(file, "Parquet", error) from error
    # `messages` may be the chat that everything else is missing for.
    bulky = _LEFT_OUT - {"messages"} if _is_chat(columns) else _LEFT_OUT
    wanted = [c for c in columns if c not in bulky]
    size = 200_000

    def rows() -> _Numbered:
        for offset in range(0, height, size):
            try:
                part = pl.scan_parquet(file).select(wanted).slice(offset, size).collect()
            except Exception as error:
                raise _unreadable(file, "Parquet", error) from error
            yield from enumerate(part.iter_rows(named=True), offset + 1)

    return columns, rows()


def _open_csv(file: Path) -> tuple[list[str], _Numbered]:
    import polars as pl

    separator = "\t" if file.suffix.lower() == ".tsv" else ","
    try:
        data = pl.read_csv(file, infer_schema=False, separator=separator)
    except Exception as error:
        raise _unreadable(file, "CSV", error) from error
    return data.columns, iter(enumerate(data.iter_rows(named=True), 1))


def _unreadable(file: Path, kind: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(f"{file}: not a readable {kind} file (truncated or damaged?): {reason}")


def _read_json(file: Path) -> list[Any] | None:
    """The rows of a JSON file; None where it is JSON lines under another name."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise InputError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError(f"{_line_of_long_number(file)}: {_LONG_NUMBER}") from None
    except RecursionError:
        raise InputError(f"{file}: JSON nested too deeply") from None
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        if len(lists) != 1:
            if not lists:
                return [data]
            raise InputError(
                f"{file}: an object with {len(lists)} lists; expected a list of problems, or an"
                " object with one list"
            )
        data = lists[0]
    if not isinstance(data, list):
        raise InputError(f"{file}: expected a list of problems, found {_kind(data)}")
    return data


def _line_of_long_number(file: Path) -> str:
    """The file and, where one line holds it, the line of an integer too long to be read."""
    digits = re.compile(rb"(?:^|[\s:,\[])-?\d{%d,}" % (sys.get_int_max_str_digits() + 1))
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if digits.search(line):
                return f"{file}, line {number}"
    return str(file)


def _objects(file: Path, data: Iterable[Any]) -> _Numbered:
    for number, row in enumerate(data, 1):
        if not isinstance(row, dict):
            raise InputError(f"{file}, row {number}: expected an object, found {_kind(row)}")
        yield number, row


def _json_lines(file: Path) -> _Numbered:
    """Rows with their line numbers; read line by line, so a large file needs little memory."""
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise InputError(f"{file}, line {number}: not UTF-8: {error.reason}") from None
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{file}, line {number}: not valid JSON: {error.msg} at column {error.colno}"
                ) from None
            except ValueError:  # Python's limit on the digits of an integer
                raise InputError(f"{file}, line {number}: {_LONG_NUMBER}") from None
            except RecursionError:
                raise InputError(f"{file}, line {number}: JSON nested too deeply") from None
            if not isinstance(row, dict):
                raise InputError(f"{file}, line {number}: expected an object, found {_kind(row)}")
            yield number, row


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "nothing",
    }
    return names.get(type(value), f"a {type(value).__name__}")


# --- schemas ----------------------------------------------------------------------------------


def _is_chat(columns: Iterable[str]) -> bool:
    """Whether ``messages`` is the question: nothing else is."""
    names = set(columns)
    return "messages" in names and not names & set(_QUESTION_COLUMNS)


def _detect(file: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The schema of a file, from its columns and, where these do not tell, its first rows."""
    names = set(columns)

    def has(*wanted: str) -> bool:
        return names.issuperset(wanted)

    if has(*_REQUIRED["problems"]):
        return "problems"
    if has(*_REQUIRED["verl"]):
        infos = [row.get("extra_info") for row in rows]
        texts = [isinstance(i, dict) and isinstance(i.get("index"), str) for i in infos]
        return "dapo" if any(texts) else "verl"
    if has("problem", "answer") and (has("generations") or has("uuid", "source")):
        return "openr1"
    if has("problem", "answer", "solution") and not names & {"level", "type", "subject"}:
        return "deepscaler"
    if has("problem", "solution"):
        return "math"
    if has("question", "answer") and any("####" in str(row.get("answer")) for row in rows):
        return "gsm8k"
    if _is_chat(columns):
        return "chat"
    if names & set(_QUESTION_COLUMNS) and names & set(_ANSWER_COLUMNS):
        return "plain"
    known = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    raise InputError(
        f"{file}: no known schema has the columns {', '.join(columns) or '(none)'};"
        f" known are {known}"
    )


def _check_columns(file: Path, columns: Sequence[str], fmt: str) -> None:
    missing = [c for c in _REQUIRED.get(fmt, ()) if c not in columns]
    if fmt == "plain":
        for choice in (_QUESTION_COLUMNS, _ANSWER_COLUMNS):
            if not set(choice) & set(columns):
                missing.append(" or ".join(choice))
    if missing:
        raise InputError(
            f"{file}: column {missing[0]} is missing; format {fmt} needs {FORMATS[fmt]}; found are"
            f" {', '.join(columns) or 'none'}"
        )


def _convert(
    file: str,
    number: int,
    row: Mapping[str, Any],
    fmt: str,
    verifier: str,
    default_source: str,
) -> _Problem:
    """One row as a problem.

    Raises:
        _RowError: it has no question, no gold answer, or something of another type.
    """
    used = {"answer", "verifier", *_LEFT_OUT}  # everything else goes into metadata
    own_id: Any = next((row[c] for c in _ID_COLUMNS if row.get(c) is not None), None)
    own_source: Any = row.get("source")
    said: str | None = None  # what the assistant answered, in a chat
    rest: dict[str, Any] = {}
    verifier = verifier if row.get("verifier") is None else _text(row["verifier"], "verifier")
    if fmt == "problems":
        prompt = _messages(row.get("prompt"), "prompt")
        own_id = row.get("problem_id")
    elif fmt in ("verl", "dapo"):
        prompt = _messages(row.get("prompt"), "prompt")
        own_source = row.get("data_source")
        info = row.get("extra_info")
        index = info.get("index") if isinstance(info, Mapping) else None
        own_id = None if index is None else f"{own_source}-{index}"
        model = row.get("reward_model")
        if not isinstance(model, Mapping):
            raise _RowError(f"reward_model is {_kind(model)}, not an object with ground_truth")
        others = {k: v for k, v in model.items() if k != "ground_truth"}
        rest = {"reward_model": others} if others else {}
        used |= {"prompt", "data_source", "reward_model"}
    elif fmt == "chat":
        prompt, said = _split_chat(row.get("messages"))
        used.add("source")
    else:
        columns = _REQUIRED.get(fmt) or tuple(row)
        column = next((c for c in _QUESTION_COLUMNS if c in columns), _QUESTION_COLUMNS[0])
        prompt = _question(row.get(column), column)
        used |= {column, "source"}
    if fmt == "problems":
        metadata = _metadata_text(row.get("metadata"))
    else:
        rest |= {k: v for k, v in row.items() if k not in used and v is not None}
        metadata = _json(rest) if rest else None
    label = own_source if isinstance(own_source, str) and own_source else default_source
    return _Problem(
        file=file,
        row=number,
        own_id=_tidy_id(own_id),
        prompt=prompt,
        answer=_answer(row, fmt, said, verifier),
        verifier=verifier,
        source=_clean(label),
        metadata=metadata,
    )


def _text(value: Any, column: str) -> str:
    if isinstance(value, str) and value.strip():
        return _clean(value)
    if value is None or isinstance(value, str):
        raise _RowError(f"{column} is empty")
    raise _RowError(f"{column} is {_kind(value)}, not text")


def _messages(value: Any, column: str) -> list[dict[str, str]]:
    """A chat, checked: roles and texts, and a user message that says something."""
    if value is None or value == []:
        raise _RowError(f"{column} is empty: there is no question")
    if not isinstance(value, list):
        raise _RowError(f"{column} is {_kind(value)}, not a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise _RowError(f"a message in {column} is {_kind(message)}, not an object")
        role, content = message.get("role"), message.get("content")
        for name, text in (("role", role), ("content", content)):
            if not isinstance(text, str):
                raise _RowError(f"a message's {name} in {column} is {_kind(text)}, not text")
        messages.append({"role": _clean(str(role)), "content": _clean(str(content))})
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise _RowError(f"{column} has no user message that says something: there is no question")
    return messages


def _question(value: Any, column: str) -> list[dict[str, str]]:
    """A question, text or messages; assistant messages at the end are answers and go."""
    if isinstance(value, list):
        return _split_chat(value, column)[0]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _RowError(f"{column} is empty: there is no question")
    return [{"role": "user", "content": _text(value, column)}]


def _split_chat(value: Any, column: str = "messages") -> tuple[list[dict[str, str]], str | None]:
    """A chat without the assistant's messages at its end, and the last of these."""
    messages = _messages(value, column)
    said = None
    while messages[-1]["role"] == "assistant":
        last = messages.pop()["content"]
        said = last if said is None else said
    return messages, said


def _answer(row: Mapping[str, Any], fmt: str, said: str | None, verifier: str) -> str:
    """The gold answer of a row."""
    if fmt in ("verl", "dapo"):
        return _gold(row["reward_model"].get("ground_truth"), "reward_model.ground_truth", verifier)
    if fmt == "gsm8k":
        text = _text(row.get("answer"), "answer")
        _, mark, gold = text.rpartition("####")
        if not mark:
            raise _RowError("no #### in answer, which gsm8k has before the gold answer")
        gold = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", gold.strip())
        return _gold(gold, "answer after ####", verifier)
    if row.get("answer") is not None or fmt in ("problems", "openr1", "deepscaler"):
        return _gold(row.get("answer"), "answer", verifier)
    if fmt == "plain" and row.get("ground_truth") is not None:
        return _gold(row["ground_truth"], "ground_truth", verifier)
    if row.get("solution") is not None:
        text = _text(row["solution"], "solution")
        boxed = last_boxed(text)
        if boxed is None and fmt != "math" and "\n" not in text.strip():
            return text.strip()  # many sets keep the bare gold answer in `solution`
        if boxed is None:
            raise _RowError("no \\boxed{...} in solution, and no answer column")
        return _gold(boxed, "\\boxed in solution", verifier)
    if fmt == "chat":
        if said is None:
            raise _RowError(
                "no answer: neither a column answer nor an assistant message at the end"
            )
        boxed = last_boxed(said)
        if boxed is None:
            raise _RowError("no \\boxed{...} in the last assistant message, and no answer column")
        return boxed
    raise _RowError("the question has no answer")


def _gold(value: Any, column: str, verifier: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
        raise _RowError(f"{column} is {_kind(value)}, not text or a number")
    if isinstance(value, float):  # a column of integers with gaps comes as floats
        value = int(value) if value.is_integer() else value
    text = "" if value is None or value != value else _clean(str(value)).strip()
    if not text:
        raise _RowError(f"{column} is empty: the question has no answer")
    if is_function(verifier):
        return text
    return last_boxed(text) or text


def _metadata_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return _clean(value) if value else None
    return _json(value)


def _json(value: Any) -> str:
    return _clean(json.dumps(value, ensure_ascii=False, default=str))


def _clean(text: str) -> str:
    r"""Text that UTF-8 can hold: a lone surrogate (JSON's ``\ud800``) becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- ids, duplicates, gold answers --------------------------------------------------------------


def _prompt_json(prompt: Sequence[Mapping[str, str]]) -> bytes:
    return json.dumps(prompt, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _question_key(prompt: Sequence[Mapping[str, str]]) -> bytes:
    parts = [part for m in prompt for part in (m["role"], " ".join(m["content"].split()))]
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).digest()


def _tidy_id(value: Any) -> str | None:
    """A set's own id in characters that file names and rollout ids can hold; None if it has none.

    ``test/precalculus/807.json`` becomes ``test-precalculus-807.json``.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = re.sub(r"[^\w.:+=@-]+", "-", _clean(str(value))).strip("-")
    return text if 0 < len(text) <= 128 else None


def _identifiers(problems: Sequence[_Problem], required: bool) -> tuple[list[str], str]:
    """A unique id a problem, and where they come from (``own ids`` or ``the prompts' hashes``)."""
    own = [p.own_id for p in problems]
    given = [identifier for identifier in own if identifier is not None]
    if len(given) == len(problems) == len(set(given)):
        return given, "the set's own"
    if required:
        seen: dict[str | None, int] = {}
        for p in problems:
            if p.own_id is None or p.own_id in seen:
                what = f"is also in row {seen[p.own_id]}" if p.own_id in seen else "is missing"
                raise InputError(f"{p.file}, row {p.row}: problem_id {p.own_id!r} {what}")
            seen[p.own_id] = p.row
    counts: dict[str, int] = {}
    hashed = []
    for p in problems:
        name = hashlib.blake2b(_prompt_json(p.prompt), digest_size=8).hexdigest()
        counts[name] = counts.get(name, 0) + 1
        hashed.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return hashed, "the prompts' hashes"


def _gold_faults(
    data: pl.DataFrame,
    places: Sequence[tuple[str, int]],
    origin: str,
    say: Callable[[str], None],
    workers: int | None,
    timeout: float,
) -> list[dict[str, Any]]:
    """The gold answers that their verifiers cannot judge against; checked in worker processes."""
    from exgrpo_cli.verifiers.pool import Pool

    rows = [
        (index, verifier, answer)
        for index, (verifier, answer) in enumerate(data.select("verifier", "answer").iter_rows())
        # A number needs no check; whole sets (AIME, DAPO, GSM8K) are numbers.
        if not (verifier in ("math", "numeric") and _NUMBER.fullmatch(answer))
    ]
    faults = []
    size = 5000
    with Pool(workers, timeout) as pool:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            whys = pool.check_golds([(verifier, answer) for _, verifier, answer in part])
            for (index, verifier, answer), why in zip(part, whys, strict=True):
                if why is not None:
                    file, number = places[index]
                    faults.append(
                        {
                            "file": file,
                            "row": number,
                            "problem_id": data["problem_id"][index],
                            "answer": answer,
                            "verifier": verifier,
                            "why": why,
                        }
                    )
            if len(rows) > size:
                say(f"{origin}: checked {min(start + size, len(rows))} of {len(rows)} gold answers")
    if faults:
        one = faults[0]
        say(
            f"{origin}: {len(faults)} gold answers that their verifier cannot read, or only as"
            f" text; the first: row {one['row']}, {str(one['answer'])[:80]!r} ({one['verifier']}):"
            f" {one['why']}"
        )
    return faults
