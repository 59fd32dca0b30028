"""Questions with options: their texts go into the prompt, and the gold answer is a letter."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_cli.problems.readers import Number, RowError
from exgrpo_cli.problems.values import NoGoldError, scalar_text, structure
from exgrpo_cli.verifiers.choice import letters

LETTERS = "ABCDEFGHIJ"
"""As many as the verifier ``choice`` knows."""
OPTION_COLUMNS = ("options", "choices")
LETTER_COLUMNS = (
    "answerKey", "answer_idx", "answer_index", "answer_letter", "answer", "correct",
    "correct_answer", "expected_answer", "ground_truth", "gold", "label",
)  # fmt: skip
"""Where the right option may be named; columns that name one must agree."""
WRONG = ("incorrect_answer_1", "incorrect_answer_2", "incorrect_answer_3")
"""GPQA's columns beside ``correct_answer``."""

_ONE = "Answer with the letter of the right option."
_ALL = "Answer with the letters of all right options."
_LABEL = re.compile(r"\s*[(\[]?([A-Ja-j])\s*[).:\]]\s*(.*)", re.DOTALL)


def options_in(row: Mapping[str, Any], told: str | None = None) -> list[tuple[str, str]]:
    """A row's options, each with the label that the set gives it; empty where it has none.

    Read are a list of texts (MMLU, MMLU-Pro; AQuA's begin with their letters), ``text`` and
    ``label`` (ARC), letters with texts (MedQA), and columns A, B, C, ... (MMLU as CSV).

    Args:
        told: the column that holds them, where the user says so.

    Raises:
        RowError: something in the list is no text.
    """
    for column in (told,) if told else OPTION_COLUMNS:
        value = structure(row.get(column))
        if isinstance(value, Mapping) and isinstance(value.get("text"), list):
            labels, texts = value.get("label"), value["text"]
            if not isinstance(labels, list) or len(labels) != len(texts):
                labels = LETTERS[: len(texts)]
            return _texts(zip(labels, texts, strict=True), column)
        if isinstance(value, Mapping) and value and set(value) <= set(LETTERS):
            return _texts([(name, value[name]) for name in LETTERS if value.get(name)], column)
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            return _texts([(v.get("label"), v.get("text")) for v in value], column)
        if isinstance(value, list) and value:
            options = _texts([("", text) for text in value], column)
            cut = [_LABEL.fullmatch(text) for _, text in options]
            if all(m and m[1].upper() == name for m, name in zip(cut, LETTERS, strict=False)):
                return [(m[1].upper(), m[2].strip()) for m in cut if m]
            return options
        if isinstance(value, str) and value.strip():
            raise RowError(
                f"{column} is text that is no list of options; as JSON they would be put into the"
                " prompt, and --format plain leaves them out"
            )
    if told is None and all(row.get(name) is not None for name in "ABC"):
        return _texts([(name, row[name]) for name in LETTERS if row.get(name) is not None], "A")
    return []


def _texts(pairs: Any, column: str) -> list[tuple[str, str]]:
    return [
        (str(label or ""), scalar_text(text, f"an option in {column}")) for label, text in pairs
    ]


def gpqa_options(question: str, row: Mapping[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """GPQA's four options in an order that follows from the question, and the right one's letter.

    The order is by a hash of question and option, so it is the same on every machine.

    Raises:
        RowError: an option is missing.
        NoGoldError: the right one is.
    """
    texts = [scalar_text(row.get(c), c).strip() for c in ("correct_answer", *WRONG)]
    if not texts[0]:
        raise NoGoldError("Correct Answer is empty")
    if not all(texts):
        raise RowError("an Incorrect Answer is empty")

    def place(number: int) -> bytes:
        key = f"{question}\x1f{texts[number]}\x1f{number}"
        return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).digest()

    order = sorted(range(len(texts)), key=place)
    return [("", texts[number]) for number in order], LETTERS[order.index(0)]


def with_options(question: str, options: Sequence[tuple[str, str]], gold: str) -> str:
    """The question with its options, lettered from A, and what to answer with: a letter, or the
    letters where the gold answer has several."""
    if not 2 <= len(options) <= len(LETTERS):
        raise RowError(f"{len(options)} options; from 2 to {len(LETTERS)} can be asked for")
    if not all(text.strip() for _, text in options):
        raise RowError("an option is empty")
    lines = [f"{name}. {text.strip()}" for name, (_, text) in zip(LETTERS, options, strict=False)]
    return "\n".join((question.rstrip(), "", *lines, "", _ALL if len(gold) > 1 else _ONE))


def gold_letters(
    row: Mapping[str, Any], options: Sequence[tuple[str, str]], told: str | None = None
) -> str:
    """The letter of the right option; of several, as in ``AC``, all are asked for.

    It may be given as the option's label, its place from 0, or its text.

    Args:
        told: the column that names it, where the user says so.

    Raises:
        RowError: a column names no option, or two columns name different ones.
        NoGoldError: no column names one.
    """
    found: dict[str, str] = {}
    faults: list[RowError] = []
    for column in (told,) if told else LETTER_COLUMNS:
        value = row.get(column)
        if value in (None, "", []) or (column == "label" and found):
            continue
        several = value if isinstance(value, list) else [value]
        try:
            named = {name for one in several for name in _named(one, options, column)}
            found[column] = "".join(sorted(named))
        except RowError as error:  # a text that explains, beside the column that names
            faults.append(error)
    if faults and not found:
        raise faults[0]
    if not found:
        raise NoGoldError("no column names the right option")
    if len(set(found.values())) > 1:
        said = ", ".join(f"{column} option {name}" for column, name in found.items())
        raise RowError(f"the columns disagree on the right option: {said}")
    return next(iter(found.values()))


def _named(value: Any, options: Sequence[tuple[str, str]], column: str) -> str:
    """The letters of the options that a value names, mostly one."""
    text = scalar_text(value, column).strip()
    if isinstance(value, (int, float)):
        whole = not isinstance(value, Number) and float(value).is_integer()
        place = int(value) if whole else -1
        labels = [label for label, _ in options]
        if text in labels:  # ARC's 1 to 4
            place = labels.index(text)
        if 0 <= place < len(options):
            return LETTERS[place]
        raise RowError(f"{column} is {text}, which is no place among {len(options)} options")
    places = {i for i, (label, _) in enumerate(options) if label and label == text.strip("().")}
    if not places and not any(label for label, _ in options) and len(text) == 1:
        places = {LETTERS.index(text.upper())} if text.upper() in LETTERS else set()
    if not places:
        places = {i for i, (_, option) in enumerate(options) if option.strip() == text}
        if text.isascii() and text.isdigit() and int(text[:9]) < len(options):
            places.add(int(text[:9]))
        if len(places) > 1:
            raise RowError(f"{column} is {text!r}, which names several options, by place or text")
    if not places:
        places = {LETTERS.index(name) for name in letters(text) or ""}
    if places and max(places) < len(options):
        return "".join(LETTERS[place] for place in sorted(places))
    raise RowError(f"{column} is {text!r:.80}, which names none of the {len(options)} options")
