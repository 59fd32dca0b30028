"""The final answer of a response. Every function here takes time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable

from exgrpo_cli.verifiers.boxes import boxed, opened, strip_answer
from exgrpo_cli.verifiers.phrases import last_stated, tidy

__all__ = ["RULES", "after_thinking", "extract_answer", "gold_answer", "last_boxed", "strip_answer"]

_TAG = re.compile(r"<(/?)answer\s*+>", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S.*)$", re.MULTILINE)
_ANSWER_HEADING = re.compile(r"\W*(?:the\s+)?(?:final\s+)?(?:answer|答案)\W*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.。]\**+(?:\s|\Z)|(?<!\s)\s++I hope it is correct")
_HEADINGS = 20  # lines of hashes that may be headings, from the last on
_WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{3,}")


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; the whole text where there is none.

    Empty where a ``<think>`` after it is never closed: who was cut off in a thought, or has taken
    it up again, has no answer.
    """
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def gold_answer(text: str) -> str | None:
    r"""The answer of a solution: its last ``\boxed{...}``, or the last boxes that make a list.

    Returns:
        As the answer of a response would be read: ``\boxed{1} and \boxed{-2}`` is ``1, -2``. None
        where there is no box, or the last one is never closed.
    """
    return boxed(text) or None


last_boxed = gold_answer


def _answer_tag(text: str) -> str | None:
    begin: int | None = None
    found: str | None = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:  # else it is doubled
            found = text[begin : tag.start()].strip() or found
            begin = None
    if begin is not None:
        return ""
    if found is None:
        return None
    box = boxed(found)
    if box is not None:
        return box
    stated = last_stated(found)
    return stated[1] if stated and stated[1] else tidy(found)


def _hashes(text: str) -> str | None:
    found = _last_hashes(text, headings=True)
    return found[1] if found else None


def _last_hashes(text: str, headings: bool) -> tuple[int, str] | None:
    """The last line ``#### x`` and where it begins. It may be a heading of the fourth level:
    without ``headings`` words do not count unless they are the text's end."""
    if "####" not in text:
        return None
    if text.rstrip().endswith("\n####"):
        return len(text), ""
    for line in list(_HASHES.finditer(text))[: -_HEADINGS - 1 : -1]:
        said = line[1]
        stated = last_stated(said)
        if stated and stated[1]:
            return line.start(), stated[1]
        if _ANSWER_HEADING.fullmatch(said):
            continue
        if not headings and _WORD.search(said) and text[line.end() :].strip():
            return None
        end = _SENTENCE_END.search(said)
        answer = tidy(said[: end.start()] if end else said)
        answer = opened(answer) if answer else None
        return (line.start(), answer) if answer is not None else None
    return None


def _phrase(text: str) -> str | None:
    found = last_stated(text)
    return found[1] if found else None


def _hashes_or_phrase(text: str) -> str | None:
    places = [place for place in (_last_hashes(text, False), last_stated(text)) if place]
    return max(places)[1] if places else None


def _last_line(text: str) -> str | None:
    text = text.rstrip()
    line = text[text.rfind("\n") + 1 :]
    end = _SENTENCE_END.search(line)
    answer = tidy(line[: end.start()] if end else line)
    return opened(answer) if answer is not None else None


def _whole(text: str) -> str | None:
    return text.strip() or None


RULES: dict[str, tuple[Callable[[str], str | None], ...]] = {
    "boxed": (boxed,),
    "answer_tag": (_answer_tag,),
    "hashes": (_hashes,),
    "phrase": (_phrase,),
    "last_line": (_last_line,),
    "whole": (_whole,),
    # A box counts also where it stands outside of the tags.
    "auto": (boxed, _answer_tag, _hashes_or_phrase),
}
"""Where an answer is looked for, by the name of ``verify.extract``; the first that is there counts.

``boxed``: the last ``\\boxed{...}``, or the last boxes that make a list. ``answer_tag``: the last
``<answer>...</answer>``. ``hashes``: the last line ``#### x``. ``phrase``: the last ``answer is
x``, line ``Answer: x`` or heading ``Final answer`` with x below it; in Chinese, Japanese and
Korean, too. ``last_line``: the last line that is not empty. ``whole``: all of it; the verifier
looks for the answer itself. ``auto``: a box, else a tag, else the later of hashes and phrase.

A rule gives an empty text where the answer was cut off; then no other rule is asked."""


def extract_answer(response: str, rule: str = "auto") -> str | None:
    r"""The final answer of a response without its wrapping, or None when it gives none.

    Only what follows the thought is searched (:func:`after_thinking`). A box inside of an answer
    is opened. The last answer counts; where the text ends within it, there is none, whatever was
    said before.
    """
    text = after_thinking(response)
    for find in RULES[rule]:
        found = find(text)
        if found is not None:
            return found or None
    return None
