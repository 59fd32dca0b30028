"""A row of a known format as a problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exgrpo_cli.problems.choices import WRONG, gold_letters, gpqa_options, options_in, with_options
from exgrpo_cli.problems.formats import (
    GOLDS,
    IDS,
    QUESTIONS,
    REQUIRED,
    WITH_OPTIONS,
    WORKED,
    at,
    by_known_names,
    known,
)
from exgrpo_cli.problems.readers import LEFT_OUT, RowError, kind_name
from exgrpo_cli.problems.values import (
    NoGoldError,
    chat_of,
    clean,
    dump,
    golds_in,
    golds_of,
    question_of,
    split_chat,
    structure,
    text_of,
    worked_gold,
)
from exgrpo_cli.verifiers import is_function

_ONLY_GOLD = {"openr1": "answer", "deepscaler": "answer", "olympiadbench": "final_answer"}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """How a file's rows are read."""

    fmt: str
    verifier: str
    """Of rows that name none."""
    source: str
    """Of rows that name none."""
    told: Mapping[str, str] = field(default_factory=dict)
    """Columns that the user names, by :data:`exgrpo_cli.problems.formats.FIELDS`."""
    detected: bool = False
    """Whether the format was found, and not told."""

    def column(self, name: str) -> str:
        """The column of a field: the one told, or of the field's own name."""
        return self.told.get(name, name)


@dataclass(frozen=True)
class Problem:
    """A row as a problem."""

    file: str
    row: int
    own_id: str | None
    prompt: list[dict[str, str]]
    golds: list[str]
    """Any is right; the first is the column ``answer``."""
    verifier: str
    source: str
    metadata: str | None


@dataclass
class _Content:
    """What a format finds in a row."""

    prompt: list[dict[str, str]]
    golds: list[str]
    used: set[str]
    """The columns that do not go into the metadata."""
    own_id: Any = None
    source: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Goes into the metadata."""
    letter: bool = False
    """Whether the gold is the letter of an option."""


def convert(file: str, number: int, raw: Row, how: Reading) -> Problem:
    """One row as a problem.

    Raises:
        RowError: it has no question, or something of another type.
        NoGoldError: it has no gold answer.
    """
    row = by_known_names(raw)
    own = at(row, how.column("verifier"))
    verifier = how.verifier if own is None else text_of(own, "verifier")
    content = _READERS.get(how.fmt, _read_columns)(row, how, verifier)
    # The letter of an option is for `choice`, whatever the set's other rows are for.
    if content.letter and own is None and verifier != "exact" and not is_function(verifier):
        verifier = "choice"
    own_id = at(row, how.told["id"]) if "id" in how.told else content.own_id
    if own_id is None:
        own_id = next((row[c] for c in IDS if row.get(c) is not None), None)
    source = content.source or at(row, how.column("source"))
    golds = content.golds
    if how.fmt == "problems":
        value = row.get("metadata")
        metadata = clean(value if isinstance(value, str) else dump(value)) if value else None
        golds = golds_of(golds[0], metadata)
    else:
        used = content.used | LEFT_OUT | {how.column("verifier")}
        used |= set() if content.source else {how.column("source")}
        others = {k: v for k, v in raw.items() if v is not None and not {k, known(k)} & used}
        rest = content.extra | others | ({"golds": golds} if len(golds) > 1 else {})
        metadata = dump(rest) if rest else None
    return Problem(
        file=file,
        row=number,
        own_id=tidy_id(own_id),
        prompt=content.prompt,
        golds=golds,
        verifier=verifier,
        source=clean(source) if isinstance(source, str) and source else clean(how.source),
        metadata=metadata,
    )


def tidy_id(value: Any) -> str | None:
    """A set's own id in characters that file names and rollout ids can hold; None if it has none.

    ``test/precalculus/807.json`` becomes ``test-precalculus-807.json``.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = re.sub(r"[^\w.:+=@-]+", "-", clean(str(value))).strip("-")
    return text if 0 < len(text) <= 128 else None


# --- by format ------------------------------------------------------------------------------------


def _read_problems(row: Row, how: Reading, verifier: str) -> _Content:
    prompt = chat_of(row.get("prompt"), "prompt")
    golds = golds_in(row.get("answer"), "answer", verifier)
    return _Content(prompt, golds, set(), row.get("problem_id"))


def _read_verl(row: Row, how: Reading, verifier: str) -> _Content:
    prompt = question_of(row.get("prompt"), "prompt")
    info, model = structure(row.get("extra_info")), structure(row.get("reward_model"))
    if not isinstance(model, Mapping):
        raise RowError(f"reward_model is {kind_name(model)}, not an object with ground_truth")
    golds = golds_in(model.get("ground_truth"), "reward_model.ground_truth", verifier)
    others = {k: v for k, v in model.items() if k != "ground_truth"}
    source = row.get("data_source")
    index = info.get("index") if isinstance(info, Mapping) else None
    return _Content(
        prompt,
        golds,
        {"prompt", "data_source", "reward_model", "answer"},
        None if index is None else f"{source or how.source}-{index}",
        source,
        {"reward_model": others} if others else {},
    )


def _read_chat(row: Row, how: Reading, verifier: str) -> _Content:
    column = "messages" if how.fmt == "chat" else "conversations"
    prompt, said = split_chat(row.get(column), column)
    return _Content(prompt, _golds(row, how, verifier, said), {column, "answer"})


def _read_gpqa(row: Row, how: Reading, verifier: str) -> _Content:
    question = text_of(row.get("question"), "Question")
    options, letter = gpqa_options(question, row)
    prompt = question_of(with_options(question, options, letter), "Question")
    return _Content(prompt, [letter], {"question", "correct_answer", *WRONG}, letter=True)


def _read_columns(row: Row, how: Reading, verifier: str) -> _Content:
    """The formats that have a column for the question and one for its answer."""
    asked, value = _asked(row, how)
    options = options_in(row, how.told.get("options"))
    if options and how.fmt in WITH_OPTIONS:
        answer = gold_letters(row, options, how.told.get("answer"))
        prompt = question_of(value, asked)
        last = next(m for m in reversed(prompt) if m["role"] == "user")
        last["content"] = with_options(last["content"], options, answer)
        return _Content(prompt, [answer], {asked, how.column("answer")}, letter=True)
    if options and how.detected:
        raise RowError(f"it has options, unlike the first rows; tell --format mmlu or {how.fmt}")
    if how.fmt == "olympiadbench" and isinstance(row.get("context"), str) and row["context"]:
        value = f"{row['context']}\n\n{text_of(value, asked)}"
    used = {asked, how.column("answer")}
    if asked == "instruction" and isinstance(row.get("input"), str):  # Alpaca's
        value = f"{text_of(value, asked)}\n\n{row['input']}".rstrip()
        used.add("input")
    prompt = question_of(value, asked)
    return _Content(prompt, _golds(row, how, verifier), used)


_READERS: dict[str, Callable[[Row, Reading, str], _Content]] = {
    "problems": _read_problems,
    "verl": _read_verl,
    "dapo": _read_verl,
    "chat": _read_chat,
    "sharegpt": _read_chat,
    "gpqa": _read_gpqa,
}


def _asked(row: Row, how: Reading) -> tuple[str, Any]:
    """The question's column and value."""
    if "question" in how.told:
        return how.told["question"], at(row, how.told["question"])
    columns = [c for c in QUESTIONS if c in REQUIRED.get(how.fmt, QUESTIONS)] or list(QUESTIONS)
    here = [c for c in columns if row.get(c) is not None] or [c for c in columns if c in row]
    column = here[0] if here else columns[0]
    return column, row.get(column)


def _golds(row: Row, how: Reading, verifier: str, said: str | None = None) -> list[str]:
    """A row's gold answers; ``said`` is what the assistant answered at the end of a chat."""
    fmt, told = how.fmt, how.told.get("answer")
    if fmt == "gsm8k":
        column = told or "answer"
        value = at(row, column)
        if value is None or value == "":
            raise NoGoldError(f"{column} is empty")
        text = text_of(value, column)
        _, mark, gold = text.rpartition("####")
        if not mark:
            raise RowError(f"no #### in {column}, which gsm8k has before the gold answer")
        return golds_in(_THOUSANDS.sub("", gold), f"{column} after ####", verifier)
    if told is not None:
        value = at(row, told)
        if known(told) in WORKED and value:
            return [worked_gold(text_of(value, told), told)]
        return golds_in(value, told, verifier)
    only = _ONLY_GOLD.get(fmt)
    for column in (only,) if only else GOLDS:
        if row.get(column) not in (None, ""):
            return golds_in(row[column], column, verifier)
    for column in () if only else WORKED:
        value = row.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is not None and value != "":
            text = text_of(value, column)
            return [worked_gold(text, column, box_only=fmt == "math", line=fmt != "math")]
    if said is not None:
        return [worked_gold(said, "the last assistant message", line=False)]
    if fmt in ("chat", "sharegpt"):
        raise RowError("no answer: neither a column answer nor an assistant message at the end")
    raise NoGoldError("the question has no answer")
