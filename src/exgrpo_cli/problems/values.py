"""Chats, texts and gold answers of rows, checked."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from exgrpo_cli.problems.readers import Number, RowError, kind_name, parse_json
from exgrpo_cli.verifiers import takes_metadata
from exgrpo_cli.verifiers.extract import extract_answer, gold_answer

# What stands where a gold answer is missing: NuminaMath's words, and what programs write.
_NO_GOLD = {"proof", "notfound", "n/a"}
_NO_VALUE = {"None", "nan", "NaN", "null", "NULL"}
# A list or dict of texts or dicts, as pandas writes them into a CSV.
_PYTHON = re.compile(r"\s*(?:\[\s*['{]|\{\s*')")
_NO_COMMA = re.compile(r"['\"]\s+['\"]")  # numpy writes none, and Python would join the texts
_SENTENCES = re.compile(r"[.!?]\s+\w")
_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bot", "model"), "assistant")


class NoGoldError(Exception):
    """The row has a question, but no gold answer; the caller leaves it out and counts it."""


def clean(text: str) -> str:
    r"""Text that UTF-8 can hold: a lone surrogate (JSON's ``\ud800``) becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def dump(value: Any) -> str:
    """A value as JSON."""
    return clean(json.dumps(value, ensure_ascii=False, default=str))


def structure(value: Any) -> Any:
    """A value that is a list or an object, also where a text holds it, as JSON or as Python."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError):
        pass
    if _PYTHON.match(value) and not _NO_COMMA.search(value):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that Python would write twice
            return ast.literal_eval(value.strip())
    return value


def text_of(value: Any, column: str) -> str:
    """A text that says something.

    Raises:
        RowError: it is empty, or something else.
    """
    if isinstance(value, str) and value.strip():
        return clean(value)
    if value is None or isinstance(value, str):
        raise RowError(f"{column} is empty")
    raise RowError(f"{column} is {kind_name(value)}, not text")


def scalar_text(value: Any, column: str) -> str:
    """A text or number as text, empty for nothing; a JSON number stays as it was written.

    Raises:
        RowError: it is something else.
    """
    if value is None:
        return ""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise RowError(f"{column} is {kind_name(value)}, not text or a number")
    text = clean(str(value)).strip()
    if isinstance(value, (float, Decimal)):  # of Parquet, where a number has no text
        mantissa, mark, exponent = text.lower().partition("e")
        text = f"{mantissa}e{int(exponent)}" if mark else mantissa
        if isinstance(value, float) and not mark:  # a column of integers with gaps is of floats
            text = text.removesuffix(".0")
    return text


# --- questions ----------------------------------------------------------------------------------


def chat_of(value: Any, column: str) -> list[dict[str, str]]:
    """A chat, checked: roles and texts, and a user message that says something.

    Messages are ``role`` and ``content`` (a text, or OpenAI's list of text parts), or ShareGPT's
    ``from`` and ``value``. The chat may be JSON text.

    Raises:
        RowError: it is none, or has no question.
    """
    value = structure(value)
    if value is None or value == []:
        raise RowError(f"{column} is empty: there is no question")
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_name(value)}, not a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise RowError(f"a message in {column} is {kind_name(message)}, not an object")
        role, content = message.get("role"), message.get("content")
        if role is None and content is None and "from" in message:
            role, content = message["from"], message.get("value")
            gold = message.get("ground_truth")
            if content is None and isinstance(gold, Mapping):  # ORZ's
                content = rf"\boxed{{{scalar_text(gold.get('value'), 'ground_truth.value')}}}"
        content = _joined(content, column)
        for name, text in (("role", role), ("content", content)):
            if not isinstance(text, str):
                raise RowError(f"a message's {name} in {column} is {kind_name(text)}, not text")
        role = _ROLES.get(str(role), str(role))
        messages.append({"role": clean(role), "content": clean(str(content))})
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise RowError(f"{column} has no user message that says something: there is no question")
    return messages


def _joined(content: Any, column: str) -> Any:
    """The text of a message's parts; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else kind_name(part)
            raise RowError(f"a message in {column} has a part of type {kind}; only text is read")
        texts.append(text)
    return "".join(texts)


def split_chat(value: Any, column: str = "messages") -> tuple[list[dict[str, str]], str | None]:
    """A chat without the assistant's messages at its end, and the last of these."""
    messages = chat_of(value, column)
    said = None
    while messages[-1]["role"] == "assistant":
        last = messages.pop()["content"]
        said = last if said is None else said
    return messages, said


def question_of(value: Any, column: str) -> list[dict[str, str]]:
    """A question, text or messages; assistant messages at the end are answers and go."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{column} is empty: there is no question")
    inside = structure(value)
    if isinstance(inside, list) and (
        inside is value or (inside and all(isinstance(m, dict) and "content" in m for m in inside))
    ):
        return split_chat(inside, column)[0]
    return [{"role": "user", "content": text_of(value, column)}]


# --- gold answers -------------------------------------------------------------------------------


def golds_in(value: Any, column: str, verifier: str) -> list[str]:
    """The gold answers in a value: a text or number, a list, or an object with ``target``.

    Several elements of a list are several golds, of which any is right. A text that is a JSON list
    of texts is such a list too.

    Raises:
        RowError: it is something else.
        NoGoldError: there is none.
    """
    own = takes_metadata(verifier)  # it knows itself what its golds mean
    if isinstance(value, str) and not own:
        inside = structure(value)
        texts = isinstance(inside, list) and all(isinstance(one, str) for one in inside)
        if texts or (isinstance(inside, Mapping) and "target" in inside):
            value = inside  # but `[1, 2]` is an answer
    if isinstance(value, Mapping) and "target" in value:
        value = value["target"]
    elements = value if isinstance(value, list) else [value]
    name = f"an element of {column}" if isinstance(value, list) else column
    several = [scalar_text(element, name).strip() for element in elements]
    none = {t for t in several if t.lower() in _NO_GOLD or t in _NO_VALUE}
    golds = several if own else [bare(text) for text in several if text not in none]
    golds = list(dict.fromkeys(gold for gold in golds if gold))
    if not golds:
        shown = f"{several[0]!r}, which is no answer" if several and several[0] else "empty"
        raise NoGoldError(f"{column} is {shown}")
    return golds


def bare(text: str) -> str:
    r"""A gold answer out of its box, or out of the lines of a solution, as in responses."""
    return gold_answer(text) or ("\n" in text and extract_answer(text)) or text


def worked_gold(text: str, column: str, *, box_only: bool = False, line: bool = True) -> str:
    r"""The gold answer of a worked solution, found as in a response.

    Args:
        line: whether one line that is no sentence is the answer itself, as in many sets.

    Raises:
        RowError: none is found.
    """
    found = gold_answer(text) if box_only else extract_answer(text)
    if found is None and line and "\n" not in text.strip():
        found = None if _SENTENCES.search(text) else text.strip()
    if found is None:
        marks = "" if box_only else ", no #### and no 'the answer is'"
        raise RowError(f"no \\boxed{{...}}{marks} in {column}, and no answer column")
    return found


def golds_of(answer: str, metadata: str | None) -> list[str]:
    """All gold answers of a row of the ``problems`` table, of which any is right: its ``answer``,
    and where there are several those under ``golds`` in its metadata."""
    if metadata is None or '"golds"' not in metadata:
        return [answer]
    try:
        values = json.loads(metadata)
    except (ValueError, RecursionError):
        return [answer]
    golds = values.get("golds") if isinstance(values, dict) else None
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        return [answer]
    return list(dict.fromkeys([answer, *golds]))
