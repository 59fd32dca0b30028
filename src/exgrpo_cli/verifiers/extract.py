"""The final answer of a response. Every function here takes time linear in the text."""

from __future__ import annotations

import re

# Possessive quantifiers (`*+`) keep these linear on a megabyte of blanks or stars.
# A box or brace that opens, a brace that closes, or an escaped character, which is neither
# (`\{` is a printed brace, and `\left\{ ... \right.` is no pair).
_BRACES = re.compile(r"\\{1,3}(?:boxed|fbox)\s*+\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) ([^\s{}$\\]+)")
_HASHES = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S.*)$", re.MULTILINE)
_ANSWER_LINE = re.compile(
    r"(?:\bthe\s++(?:final\s++|correct\s++)?answer\s++is\b\s*+:?"
    r"|^(?:[^\w\n]|_)*+(?:the\s++)?(?:final\s++)?answer\b[ \t*_]*+:)[\s*_]*+(\S.*)",
    re.IGNORECASE | re.MULTILINE,
)
# The end of the sentence, or the set phrase of few-shot prompts.
_SENTENCE_END = re.compile(r"\.(?:\s|\**+\s*+$)|(?<!\s)\s++I hope it is correct")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces balance.

    An empty box is passed over (it is usually the instruction, quoted), and so is one that is
    never closed. ``\boxed 5`` without braces counts when no box with braces is there.

    Returns:
        The content, stripped, or None.
    """
    if "boxed" not in text and "fbox" not in text:
        return None
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
            content = text[opened[1] : match.start()].strip()
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


def extract_answer(response: str) -> str | None:
    r"""The final answer of a response, or None when it gives none.

    Only what follows the last ``</think>`` is searched. The first of these that is there counts:
    the last ``\boxed{...}`` with balanced braces; the last ``<answer>...</answer>``; the last line
    ``#### x``; the last ``the (final) answer is x`` or line ``Answer: x``.

    Returns:
        The answer without its wrapping, never empty.
    """
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = _tagged(text)
    if tagged is not None:
        return tagged
    lines = _HASHES.findall(text) or _ANSWER_LINE.findall(text)
    return _tidy(lines[-1]) if lines else None
