"""The final answer of a response. Every function here takes time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable

# Possessive quantifiers (`*+`) keep these linear on a megabyte of blanks or stars.
# A box or brace that opens, a brace that closes, or an escaped character, which is neither
# (`\{` is a printed brace, and `\left\{ ... \right.` is no pair).
_BRACES = re.compile(r"\\{1,3}(?:boxed|fbox)\s*+\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) ([^\s{}$\\]+)")
_LAST_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)\s*+\{")
_HASHES = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S.*)$", re.MULTILINE)
_ANSWER_LINE = re.compile(
    r"(?:\bthe\s++(?:final\s++|correct\s++)?answer\s++is\b\s*+:?"
    r"|^(?:[^\w\n]|_)*+(?:the\s++)?(?:final\s++)?answer\b[ \t*_]*+:)[\s*_]*+(\S.*)",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_HINT = re.compile(r"answer(?:\s++is\b|[ \t*_]*+:)")
# The end of the sentence, or the set phrase of few-shot prompts.
_SENTENCE_END = re.compile(r"\.(?:\s|\**+\s*+$)|(?<!\s)\s++I hope it is correct")


def strip_answer(text: str) -> str:
    """Without the white space around it, but for the blank of a ``\\ `` at its end."""
    stripped = text.strip()
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(text.rstrip()) < len(text) else stripped


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces balance.

    An empty box is passed over (it is usually the instruction, quoted), and so is one that is
    never closed. ``\boxed 5`` without braces counts when no box with braces is there.

    Returns:
        The content, stripped, or None.
    """
    last = max(text.rfind("boxed"), text.rfind("fbox"))
    if last < 0:
        return None
    # Mostly the last box is whole, and what comes before it need not be looked at.
    match = _LAST_BOX.match(text, last - 1) if last > 0 else None
    if match is not None:
        depth = 1
        for token in _BRACES.finditer(text, match.end()):
            if token[0] == "}":
                depth -= 1
                if depth == 0:
                    content = strip_answer(text[match.end() : token.start()])
                    if content:
                        return content
                    break
            elif token[0] == "{":
                depth += 1
    return _last_whole_box(text)


def _last_whole_box(text: str) -> str | None:
    """:func:`last_boxed` by one pass over the whole text."""
    open_braces: list[tuple[int, int] | None] = []  # of a box: where it starts, where its content
    best: tuple[int, str] | None = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is None or (best is not None and opened[0] < best[0]):
                continue
            content = strip_answer(text[opened[1] : match.start()])
            if content:
                best = (opened[0], content)
        elif token[-1] == "{" and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    if best is not None:
        return best[1]
    bare = _BARE_BOX.findall(text)
    return bare[-1].rstrip(".,;:") or None if bare else None


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; the whole text where there is none."""
    return text.rpartition("</think>")[2]


def _tagged(text: str) -> str | None:
    close = text.rfind("</answer>")
    if close < 0:
        return None
    start = text.rfind("<answer>", 0, close)
    return text[start + len("<answer>") : close].strip() or None if start >= 0 else None


def _tidy(text: str) -> str | None:
    """An answer from running text: to the end of its sentence, without emphasis or ``$ $``."""
    end = _SENTENCE_END.search(text)
    text = (text[: end.start()] if end else text).strip().strip("*_").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(left) : len(text) - len(right)]
        whole = len(text) > len(left) + len(right)
        if whole and text.startswith(left) and text.endswith(right) and left not in inner:
            text = inner.strip()
    return text if text.strip(". ") else None  # "..." is none


def _box_inside(text: str) -> str:
    """The content of the last box in an answer; the answer itself where there is none."""
    return last_boxed(text) or text


def _answer_tag(text: str) -> str | None:
    tagged = _tagged(text)
    return _box_inside(tagged) if tagged is not None else None


def _hashes(text: str) -> str | None:
    lines = _HASHES.findall(text) if "####" in text else []
    return _tidy(lines[-1]) if lines else None


def _phrase(text: str) -> str | None:
    lower = text.lower()
    hints = [match.start() for match in _ANSWER_HINT.finditer(lower)]
    if not hints:
        return None
    # The search is slow: first from a little before the last place where it can match, then the
    # first. (Lower case may be longer, as of "İ"; then the places are others.)
    for hint in (hints[-1], hints[0]) if len(lower) == len(text) else (0,):
        lines = _ANSWER_LINE.findall(text, max(0, hint - 200))
        if lines:
            return _tidy(lines[-1])
    return None


def _last_line(text: str) -> str | None:
    text = text.rstrip()
    line = _tidy(text[text.rfind("\n") + 1 :])
    return _box_inside(line) if line is not None else None


RULES: dict[str, tuple[Callable[[str], str | None], ...]] = {
    "boxed": (last_boxed,),
    "answer_tag": (_answer_tag,),
    "hashes": (_hashes,),
    "phrase": (_phrase,),
    "last_line": (_last_line,),
    # A box counts also where it stands outside of the tags.
    "auto": (last_boxed, _answer_tag, _hashes, _phrase),
}
"""Where an answer is looked for, by the name of ``verify.extract``; the first that is there counts.

``boxed``: the last ``\\boxed{...}`` with balanced braces. ``answer_tag``: the last
``<answer>...</answer>``. ``hashes``: the last line ``#### x``. ``phrase``: the last ``the (final)
answer is x`` or line ``Answer: x``. ``last_line``: the last line that is not empty. ``auto``: the
first four in this order."""


def extract_answer(response: str, rule: str = "auto") -> str | None:
    r"""The final answer of a response, or None when it gives none.

    Only what follows the last ``</think>`` is searched. A box inside of an answer tag or a last
    line is opened.

    Args:
        response: the whole response.
        rule: a name in :data:`RULES`.

    Returns:
        The answer without its wrapping, never empty.
    """
    text = after_thinking(response)
    for find in RULES[rule]:
        found = find(text)
        if found is not None:
            return found
    return None
