"""The schemas of problem sets, and which one a file has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.choices import LETTER_COLUMNS, OPTION_COLUMNS, WRONG, options_in
from exgrpo_cli.problems.readers import RowError
from exgrpo_cli.problems.values import structure

FORMATS: dict[str, str] = {
    "problems": "problem_id, prompt, answer, verifier, source",
    "dapo": "as verl, with extra_info.index a string",
    "verl": "prompt (messages), reward_model.ground_truth",
    "gpqa": "Question, Correct Answer, Incorrect Answer 1 to 3",
    "arc": "question, choices (text, label), answerKey",
    "mmlu_pro": "question, options, answer or answer_index",
    "mmlu": "question, choices (or columns A to D), answer",
    "openr1": "problem, answer, uuid, source or generations",
    "deepscaler": "problem, answer, solution",
    "math": "problem, solution with \\boxed{x}, or also answer",
    "olympiadbench": "question, final_answer",
    "gsm8k": "question, answer ending in #### x",
    "chat": "messages, or also answer",
    "sharegpt": "conversations (from, value), or also answer",
    "plain": "prompt, problem, question, query or instruction (text or messages), and answer,"
    " final_answer, expected_answer, ground_truth, solution, response, output or completion",
}
"""The schemas, each with its columns; where several fit, the first is taken."""

FIELDS = ("question", "answer", "options", "id", "source", "verifier")
"""What ``--columns`` and ``problems.columns`` can name a column for."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "problems": ("problem_id", "prompt", "answer", "verifier", "source"),
    "verl": ("prompt", "reward_model"),
    "dapo": ("prompt", "reward_model"),
    "gpqa": ("question", "correct_answer", *WRONG),
    "openr1": ("problem", "answer"),
    "deepscaler": ("problem", "answer"),
    "math": ("problem", "solution"),
    "olympiadbench": ("question", "final_answer"),
    "gsm8k": ("question", "answer"),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
}
WITH_OPTIONS = ("arc", "mmlu_pro", "mmlu")
_FIXED = ("problems", "verl", "dapo", "gpqa", "chat", "sharegpt")
QUESTIONS = ("prompt", "problem", "question", "query", "instruction")
GOLDS = ("answer", "final_answer", "expected_answer", "ground_truth", "answers")
WORKED = ("solution", "response", "output", "completion")
IDS = ("unique_id", "uuid", "problem_id", "id", "question_id", "record_id")
_KNOWN = {
    re.sub(r"[\W_]+", "", name).lower(): name
    for name in (
        *QUESTIONS, *GOLDS, *WORKED, *IDS, *OPTION_COLUMNS, *LETTER_COLUMNS, *WRONG,
        "source", "data_source", "verifier", "messages", "conversations", "reward_model",
        "extra_info",
    )
} | {"questionstem": "question"}  # fmt: skip


@lru_cache(maxsize=4096)
def known(column: str) -> str:
    """A column by the name that formats know: ``Correct Answer`` is ``correct_answer``."""
    return _KNOWN.get(re.sub(r"[\W_]+", "", column).lower(), column)


def by_known_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row under the names that formats know; a column that has such a name itself comes first."""
    view = {known(name): value for name, value in row.items()} | dict(row)
    question = view.get("question")
    if isinstance(question, Mapping) and "stem" in question:  # ARC as it was first published
        view |= {"question": question["stem"], "choices": question.get("choices")}
    return view


def at(row: Mapping[str, Any], column: str) -> Any:
    """A row's value; ``extra_info.answer`` looks into objects."""
    if column in row or "." not in column:
        return row.get(column)
    head, _, rest = column.partition(".")
    inside = structure(row.get(head))
    return at(inside, rest) if isinstance(inside, Mapping) else None


# --- detection ----------------------------------------------------------------------------------

Rows = Sequence[Mapping[str, Any]]


def _index_is_text(rows: Rows) -> bool:
    infos = [structure(row.get("extra_info")) for row in rows]
    return any(isinstance(info, dict) and isinstance(info.get("index"), str) for info in infos)


def _has_options(rows: Rows, told: Mapping[str, str]) -> bool:
    for row in rows:
        try:
            if options_in(row, told.get("options")):
                return True
        except RowError:
            return True
    return False


def _fits(fmt: str, names: set[str], rows: Rows) -> bool:
    """Whether a file's columns, under known names, and its first rows are of a format."""
    if not names.issuperset(REQUIRED.get(fmt, ())):
        return False
    if fmt == "dapo":
        return _index_is_text(rows)
    if fmt in WITH_OPTIONS:
        one = {"arc": "answerKey", "mmlu_pro": "options"}.get(fmt)
        asked = names & set(QUESTIONS)
        return bool(asked) and (one is None or one in names) and _has_options(rows, {})
    if fmt == "openr1":
        return "generations" in names or {"uuid", "source"} <= names
    if fmt == "deepscaler":
        return "solution" in names and not names & {"level", "type", "subject"}
    if fmt == "gsm8k":
        return any("####" in str(row.get("answer")) for row in rows)
    if fmt in ("chat", "sharegpt"):
        return not names & set(QUESTIONS)
    if fmt == "plain":
        return bool(names & set(QUESTIONS) and names & {*GOLDS, *WORKED})
    return True


def detect(file: Path, columns: Sequence[str], rows: Rows, told: Mapping[str, str]) -> list[str]:
    """The formats that a file fits, the most specific first, given the columns that the user
    names."""
    rows = [by_known_names(row) for row in rows]
    if {"question", "answer", "options"} & set(told):
        if _has_options(rows, told):
            return ["mmlu"]
        answers = (str(at(row, told.get("answer", "answer"))) for row in rows)
        return ["gsm8k" if any("####" in answer for answer in answers) else "plain"]
    names = set(by_known_names(dict.fromkeys(columns)))
    found = [fmt for fmt in FORMATS if _fits(fmt, names, rows)]
    if not found:
        formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
        raise InputError(
            f"{file}: no known schema has the columns {', '.join(columns) or '(none)'}; name them"
            f" with --columns question=NAME,answer=NAME; known are {formats}"
        )
    return found


def check_fields(told: Mapping[str, str], known: Sequence[str] = FIELDS) -> None:
    """Refuse a field that no format has."""
    for name, column in told.items():
        if name not in known:
            raise InputError(f"--columns {name}={column}: known are {', '.join(known)}")


def check_columns(file: Path, columns: Sequence[str], fmt: str, told: Mapping[str, str]) -> None:
    """Refuse a file that lacks a column that its format or the user names."""
    found = ", ".join(columns) or "none"
    for field, column in told.items():
        if column not in columns and column.partition(".")[0] not in columns:
            raise InputError(f"{file}: no column {column} for {field}; found are {found}")
        if fmt in _FIXED and field in ("question", "answer", "options"):
            raise InputError(
                f"{file}: format {fmt} reads {FORMATS[fmt]}; with {field}={column} give no --format"
            )
    names = set(by_known_names(dict.fromkeys(columns)))
    missing = [c for c in REQUIRED.get(fmt, ()) if c not in names]
    if fmt in ("plain", *WITH_OPTIONS):
        golds = LETTER_COLUMNS if fmt in WITH_OPTIONS else (*GOLDS, *WORKED)
        missing = [" or ".join(c) for c in (QUESTIONS, golds) if not names.intersection(c)]
    if "question" in told or "answer" in told:  # what is still missing shows in the rows
        missing = []
    if missing:
        raise InputError(
            f"{file}: column {missing[0]} is missing; format {fmt} needs {FORMATS[fmt]}; found are"
            f" {found}"
        )
