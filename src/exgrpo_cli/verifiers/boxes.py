r"""``\boxed{...}`` in a text. Every function here takes time linear in the text."""

from __future__ import annotations

import itertools
import re

# Possessive quantifiers (`*+`) keep the patterns linear on a megabyte of blanks.
# A box that opens, a command or an escaped character (`\{` is a printed brace, and `\left\{ ...
# \right.` is no pair), a brace.
_TOKEN = re.compile(r"\\{1,3}(?:boxed|fbox)\s*+\{|\\(?:[a-zA-Z]++|.)|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?: ([^\s{}$\\]++)|([0-9][^\s{}$\\]*+))")
_CUT_COMMAND = re.compile(r"\\(?:box(?:ed?)?|fbox?)\Z")
# What an empty box may hold, as in "put it into \boxed{...}"
_BLANK = re.compile(r"[\s.…?_~$]*+")
_BLANK_COMMANDS = frozenset(
    ["\\" + name for name in [*",;:! _", "quad", "qquad", "dots", "ldots", "cdots", "text", "mbox"]]
)

# Between boxes that make a list: what sets them, ...
_SETTING = re.compile(
    r"\\(?:[()\[\],;:! \\]|q?quad\b|(?:text(?:bf|it|rm)?|mathrm|mbox|left|right|displaystyle)\b"
    r"|(?:lor|land|vee|wedge|cup)\b)|[${}&*~/|]"
)
_AND = r"(?:(?:and|or)(?:\s+(?:also|else|maybe|perhaps|possibly))?|和|或|与|與|及|以及|と|또는)?"
_NOT_A_LIST = (
    r"(?!(?:so|thus|hence|therefore|then|but|not?|wait|actually|now|which|that|this|it|since|as|if"
    r"|because|gives?|get|finally|final|answer|result|namely|equivalently|rather|instead)\b)"
)
# ... a comma or a conjunction, a number as (b) or 2., and a name as `y =`; or, within a line and
# after a comma or a conjunction, words as "the minimum is".
_BETWEEN = re.compile(
    rf"\s*[,;.、，；。]?\s*\(?{_AND}\s*"
    r"(?:[-•]\s*)?(?:\(?(?:\d{1,2}|[a-zA-Z]|[ivx]{2,4})[.)]\s*)?"
    rf"(?:{_NOT_A_LIST}\\?\w{{1,12}}(?:\s?\w)?(?:\(\w{{1,3}}\))?\s*=\s*)?"
    rf"|[ ]*(?:[,;]|(?=and|or))[ ]*{_AND}[ ]+(?:{_NOT_A_LIST}\w+[ ]+){{1,5}}"
    r"(?:is|are|equals|=)[ ]*",
    re.IGNORECASE,
)
_BETWEEN_LIMIT = 100  # characters


def strip_answer(text: str) -> str:
    """Without the white space around it, but for the blank of a ``\\ `` at its end."""
    stripped = text.strip()
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(text.rstrip()) < len(text) else stripped


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}``.

    Boxes that follow upon each other as a list, such as ``\boxed{1} and \boxed{2}``, are one
    answer, ``1, 2``. An empty box is passed over (it is usually the instruction, quoted).
    ``\boxed 5`` without braces counts when no box with braces is there.

    Returns:
        The content, stripped; empty when the last box was cut off: what the answer would have
        been is not known, whatever an earlier box says; None when there is no box.
    """
    if _CUT_COMMAND.search(text.rstrip()[-8:]):
        return ""
    begin = _first_box(text)
    if begin is None:
        return None
    # Mostly the last boxes say it all, and what comes before them need not be looked at.
    near = _box_near_the_end(text)
    whole, cut = _scan(text, near)
    contents = _list_at_the_end(text, whole)
    if near > begin and len(contents) == len(whole):
        whole, cut = _scan(text, begin)
        contents = _list_at_the_end(text, whole)
    if whole and whole[-1][0] > cut:
        return ", ".join(content for content, _ in itertools.groupby(contents))
    if cut >= 0:
        return ""
    bare = _BARE_BOX.findall(text, begin)
    return "".join(bare[-1]).rstrip(".,;:") or None if bare else None


def _first_box(text: str) -> int | None:
    return min((i for i in map(text.find, ("\\boxed", "\\fbox")) if i >= 0), default=None)


def _box_near_the_end(text: str) -> int:
    """Where one of the last boxes begins."""
    begin = len(text)
    for _ in range(4):
        before = max(text.rfind("\\boxed", 0, begin), text.rfind("\\fbox", 0, begin))
        begin = before if before >= 0 else begin
    return begin


def _scan(text: str, begin: int) -> tuple[list[tuple[int, int, int]], int]:
    """The boxes that are not empty, by their start: the box, its content, the content's end; and
    where the last box begins that is never closed, -1 for none."""
    whole: list[tuple[int, int, int]] = []
    opened: list[list[int]] = []  # box (-1: a plain brace), content, whether it is filled
    end = begin
    for match in _TOKEN.finditer(text, begin):
        token = match[0]
        if opened and not opened[-1][2]:
            filled = _BLANK.fullmatch(text, end, match.start()) is None
            if token[0] == "\\" and token[-1] != "{":
                filled = filled or token not in _BLANK_COMMANDS
            opened[-1][2] = filled
        end = match.end()
        if token == "{":
            opened.append([-1, end, False])
        elif token == "}":
            if not opened:
                continue
            box, content, is_filled = opened.pop()
            if is_filled and opened:
                opened[-1][2] = True
            if is_filled and box >= 0:
                whole.append((box, content, match.start()))
        elif token[-1] == "{" and len(token) > 2:
            opened.append([match.start(), end, False])
    cut = max((box for box, _, _ in opened), default=-1)
    return sorted(whole), cut


def _list_at_the_end(text: str, boxes: list[tuple[int, int, int]]) -> list[str]:
    """The contents of the last boxes as far back as they make a list."""
    contents: list[str] = []
    start = None
    for box, content, end in reversed(boxes):
        if start is not None and not _makes_a_list(text, end + 1, start):
            break
        start = box
        contents.append(strip_answer(text[content:end]))
    return contents[::-1]


def _makes_a_list(text: str, end: int, start: int) -> bool:
    """Whether a box that closes before ``end`` and the one at ``start`` belong together."""
    if not 0 <= start - end <= _BETWEEN_LIMIT:  # below 0: one within the other
        return False
    return _BETWEEN.fullmatch(_SETTING.sub(" ", text[end:start])) is not None


def opened(text: str) -> str | None:
    r"""An answer without its box: :func:`boxed`, the text itself where it has no box, and None
    where its box is empty."""
    found = boxed(text)
    if found is not None:
        return found
    return text if _first_box(text) is None else None
