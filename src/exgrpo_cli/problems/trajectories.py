"""Responses that other models or persons gave, in the files that users have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.formats import IDS, QUESTIONS, at, by_known_names, check_fields
from exgrpo_cli.problems.readers import RowError, files_of, kind_name, open_file
from exgrpo_cli.problems.rows import tidy_id
from exgrpo_cli.problems.values import clean, question_of, split_chat, structure, text_of

FIELDS = ("response", "question", "id", "source")
"""What a column can be named for."""

RESPONSES = (
    "target", "generations", "reward_model.candidates", "responses", "response", "completions",
    "completion", "outputs", "output", "generation", "generated_solution",
)  # fmt: skip
"""Columns of responses; the first that holds text counts: LUFFY's, OpenR1's, RLEP's, plain ones."""

_CHATS = ("messages", "conversations")
# Beside OpenR1's generations, one for each: what says that it was cut off.
_CUT = (("finish_reasons", "length"), ("is_reasoning_complete", False))


@dataclass(frozen=True)
class Answered:
    """A row: its question, and the responses to it."""

    where: str
    """File and row, for messages."""
    question: str | None
    """The last user message; None where the row has none."""
    ids: tuple[str, ...]
    """What the row calls its question; numbers only from a column that names a problem of the run,
    as every set counts its rows."""
    responses: list[str]
    source: str | None
    """Whose they are, where a column was told."""
    cut: int = 0
    """Responses that were cut off, and left out."""


def read_answered(
    path: Path, told: Mapping[str, str], skip_bad: bool = False
) -> Iterator[Answered | RowError]:
    """The rows of a file or folder of trajectories. With ``skip_bad`` the error of one that cannot
    be read is given, and not raised."""
    check_fields(told, FIELDS)
    for file in files_of(path):
        opened = open_file(file, whole=True)
        for number, raw in opened.rows:
            where = f"{file}, {opened.unit} {number}"
            try:
                if isinstance(raw, RowError):
                    raise raw
                yield _answered(where, by_known_names(raw), told)
            except RowError as error:
                if not skip_bad:
                    raise InputError(f"{where}: {error}") from None
                yield error


def last_question(messages: list[dict[str, str]]) -> str:
    """A chat's last user message, as it is compared: white space aside."""
    text = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    return " ".join(text.split())


def _answered(where: str, row: Mapping[str, Any], told: Mapping[str, str]) -> Answered:
    for field, name in told.items():
        if name not in row and name.partition(".")[0] not in row:
            raise RowError(f"no column {name} for {field}")
    chat = next((c for c in _CHATS if row.get(c) is not None), None)
    messages, said = split_chat(row[chat], chat) if chat else (None, None)
    asked = told.get("question") or next((c for c in QUESTIONS if row.get(c) is not None), None)
    if asked is not None and at(row, asked) is not None:
        messages = question_of(at(row, asked), asked)
        if asked == "instruction" and isinstance(row.get("input"), str):  # Alpaca's
            messages[-1]["content"] += f"\n\n{row['input']}"
    ids = _ids(row, told)
    if messages is None and not ids:
        raise RowError("neither a question nor a problem_id")
    column = told.get("response") or _column(row)
    if column is None and said is None:
        raise RowError(
            f"no response that is text; known are the columns {', '.join(RESPONSES)} and the end of"
            " a chat, and --columns response=NAME names another"
        )
    responses = [said or ""] if column is None else _texts(_listed(at(row, column)), column)
    cut = [any(_is_cut(row, name, sign, i) for name, sign in _CUT) for i in range(len(responses))]
    kept = [clean(text) for text, gone in zip(responses, cut, strict=True) if not gone]
    return Answered(
        where,
        None if messages is None else last_question(messages),
        ids,
        [text for text in kept if text.strip()],
        text_of(at(row, told["source"]), told["source"]) if "source" in told else None,
        sum(cut),
    )


def _ids(row: Mapping[str, Any], told: Mapping[str, str]) -> tuple[str, ...]:
    named = [at(row, told["id"]) if "id" in told else row.get("problem_id")]
    others = [row.get(column) for column in IDS]
    index = at(row, "extra_info.index")
    if index is not None:  # verl's
        others.append(f"{row.get('data_source')}-{index}")
    texts = [tidy_id(value) for value in others]
    found = [tidy_id(value) for value in named] + [t for t in texts if t and not t.isdigit()]
    return tuple(dict.fromkeys(text for text in found if text))


def _column(row: Mapping[str, Any]) -> str | None:
    """The column of a row's responses; one that is empty, where none holds any."""
    here = [c for c in RESPONSES if c in row or c.rpartition(".")[2] in _inside(row, c)]
    full = (c for c in here if isinstance(at(row, c), str | list | Mapping))
    return next(full, next((c for c in here if at(row, c) is None), None))


def _inside(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    value = structure(row.get(column.rpartition(".")[0]))
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> Any:
    """A list that a CSV holds as text; other texts are responses themselves."""
    inside = structure(value)
    listed = isinstance(inside, list) and all(isinstance(one, str | Mapping) for one in inside)
    return inside if listed else value


def _texts(value: Any, column: str) -> list[str]:
    """The responses in a value: a text, a message or a chat that ends in one, or a list of
    these."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_name(value)}, not text")
    if not value or not all(isinstance(one, Mapping) for one in value):
        return [text for one in value for text in _texts(one, column)]
    said = [m for m in value if m.get("role", m.get("from")) not in ("system", "user", "human")]
    if len(said) != 1:
        raise RowError(f"{column} has {len(said)} messages of the assistant; one turn is read")
    return _texts(said[0].get("content", said[0].get("value")), column)


def _is_cut(row: Mapping[str, Any], column: str, sign: Any, index: int) -> bool:
    values = structure(row.get(column))
    return isinstance(values, list) and index < len(values) and values[index] == sign
