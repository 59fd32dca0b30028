r"""Answers that math-verify reads as something else: bases, times, dates, ratios, words, sequences
with dots, and inequalities where an interval is asked for. Of normalised texts, without sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from exgrpo_cli.verifiers.sure import number

Same = Callable[[str, str], bool]
"""Whether two answers, gold first, are equal."""

_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_BASE = re.compile(
    r"\(?([0-9A-F]++)\)?(?:_|\s*+\(?\s*+(?:\\text\{)?\s*+\(?(?:in\s)?base[\s_-]*+)"
    r"[\s{(]*+(?:\\(?:text|mathrm)\s*+\{)?\s*+(?:base\s*+)?([0-9]{1,2}|[a-z]{3,7})[\s})]*+",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?\s*+(?:(?:\\text\s*+\{)?\s*+([ap])\.?\s?m\.?\s*+\}?)?",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"([0-9]{4}|[0-9]{2}(?=-[01][0-9]-[0-3][0-9]))([-/.])(0?[1-9]|1[0-2])\2(0?[1-9]|[12][0-9]|3[01])"
)
_OTHER_DATE = re.compile(r"([0-9]{1,2})([-/.])([0-9]{1,2})\2([0-9]{4})")
_DOTS = re.compile(r"\\[lc]?dots[bcimo]?(?![A-Za-z])|\.{3,}")
_COMMAND_TEXT = re.compile(r"\\text\s*+\{([^{}]*+)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_JUXTAPOSED = re.compile(r"[-+]?[0-9.]+(?:\s++[0-9.]+)+")


def compare(gold: str, found: str, same: Same) -> bool | None:
    """The verdict where the form of the texts decides, with ``same`` for their parts; None where it
    does not."""
    if _JUXTAPOSED.fullmatch(found):  # math-verify adds: "5 5" would be 10
        return False
    for form in (_by_base, _by_time, _by_ratio, _by_words):
        verdict = form(gold, found)
        if verdict is not None:
            return verdict
    if _DOTS.search(gold) or _DOTS.search(found):
        return _by_sequence(gold, found, same)
    return _by_percent(gold, found) if gold.endswith("%") else _by_relation(gold, found, same)


def _based(text: str) -> tuple[str, int] | None:
    """Digits and base of ``52_8``, ``52_{\\text{eight}}``, ``52 (base 8)``."""
    if "_" not in text and "ase" not in text:
        return None
    match = _BASE.fullmatch(text)
    if match is None:
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2].lower(), 0)
    digits = match[1].upper().lstrip("0") or "0"
    return (digits, base) if digits.isdigit() or base > 10 else None


def _by_base(gold: str, found: str) -> bool | None:
    one, other = _based(gold), _based(found)
    if other is None:
        return None
    if one is None:
        plain = number(gold)
        if plain is None:
            return None
        return other[1] == 10 and plain.value == int(other[0])
    return one == other


def _moment(text: str) -> tuple[str | int, ...] | None:
    """Time of day or date."""
    if ":" in text:
        match = _CLOCK.fullmatch(text)
        if match:
            return ("time", int(match[1]), int(match[2]), int(match[3] or 0))
        return None
    if match := _DATE.fullmatch(text):
        return ("date", int(match[1]), int(match[3]), int(match[4]))
    if match := _OTHER_DATE.fullmatch(text):
        return ("date", int(match[4]), int(match[1]), int(match[3]))
    return None


def _half_day(text: str) -> str:
    match = _CLOCK.fullmatch(text)
    return (match[4] or "").lower() if match else ""


def _by_time(gold: str, found: str) -> bool | None:
    one, other = _moment(gold), _moment(found)
    if one is None and other is None:
        return None
    if one == other:
        halves = {_half_day(gold), _half_day(found)} - {""}
        return len(halves) < 2
    # "16:25" may be a ratio, whose terms a fraction has
    if one is not None and one[0] == "time" and re.fullmatch(r"[0-9]+:[0-9]+", gold):
        above, _, below = gold.partition(":")
        return found in (f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}")
    return False


def _by_ratio(gold: str, found: str) -> bool | None:
    """Of three terms or more; of two, it is a fraction."""
    if gold.count(":") < 2 and found.count(":") < 2:
        return None
    sides = []
    for text in (gold, found):
        terms = [number(term.strip()) for term in text.split(":")]
        if not all(terms):
            return None
        sides.append([term.value for term in terms if term])
    one, other = sides
    if len(one) != len(other):
        return False
    return all(a * other[0] == b * one[0] for a, b in zip(one, other, strict=True))


def _words(text: str) -> str | None:
    """A text of words only, in lower case and without blanks."""
    plain = _COMMAND_TEXT.sub(r" \1 ", text).strip()
    return "".join(plain.lower().split()) if _WORDS.fullmatch(plain) else None


def _is_word(text: str) -> bool:
    """Whether letters are a word, and no product of variables."""
    if "\\text" in text or " " in text:
        return True
    one_case = text.islower() or text.isupper() or text.istitle()
    return one_case and any(vowel in text.lower() for vowel in "aeiou")


def _by_words(gold: str, found: str) -> bool | None:
    if not gold[-1].isalpha() and gold[-1] != "}":
        return None
    one, other = _words(gold), _words(found)
    if one is None or other is None:
        return None
    if one == other:
        return True
    # Of other letters it is another product, too: math-verify says so.
    if sorted(one) != sorted(other) or len(one) < 3:
        return None
    bare = "\\text" not in gold + found
    if bare and "".join(sorted(one)) in (one, other):  # abc, cba
        return None
    return False if _is_word(gold) or _is_word(found) else None


def split_top(text: str) -> list[str]:
    """The parts of a list: at the commas and semicolons outside of all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\[{}]|[()\[\]{},;]", text):
        token = match[0][-1]
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _sequence(text: str) -> tuple[list[str], list[str]] | None:
    """What stands before the dots and after them; None unless they stand in a list, once."""
    text = re.sub(r"^(?:\\\{|\(|\{)(.*)(?:\\\}|\)|\})$", r"\1", text, flags=re.DOTALL)
    parts = [part for part in split_top(text) if part]
    places = [index for index, part in enumerate(parts) if _DOTS.fullmatch(part)]
    if len(places) != 1 or any(_DOTS.search(p) for i, p in enumerate(parts) if i != places[0]):
        return None
    return parts[: places[0]], parts[places[0] + 1 :]


def _by_sequence(gold: str, found: str, same: Same) -> bool:
    """Sequences are equal when what they give of their beginnings and ends is."""
    one, other = _sequence(gold), _sequence(found)
    if one is None or other is None:
        return _DOTS.sub("...", gold).split() == _DOTS.sub("...", found).split()
    shared = min(len(one[0]), len(other[0]))
    if len(one[1]) != len(other[1]) or (shared < 2 and len(one[0]) != len(other[0])):
        return False
    pairs = [*zip(one[0], other[0], strict=False), *zip(one[1], other[1], strict=True)]
    return all(a == b or same(a, b) for a, b in pairs)


def _by_percent(gold: str, found: str) -> bool | None:
    """``17.5`` for ``17.5\\%``, as math-verify has it for whole numbers."""
    percent, plain = number(gold.rstrip("%").rstrip("\\ ")), number(found)
    if percent is None or plain is None:
        return None
    return True if plain.value in (percent.value, percent.value / 100) else None


# --- inequalities and intervals

_RELATION = re.compile(
    r"\\(leqslant|leqq|leq|le|geqslant|geqq|geq|ge|lt|gt|neq|ne)(?![A-Za-z])|([<>])"
)
_KIND = {"l": "<=", "g": ">=", "n": "!="}
_OR = re.compile(r",?\s*+(?:\\text\s*+\{\s*+or\s*+\}|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|\bor\b)")
_AND = re.compile(
    r",?\s*+(?:\\text\s*+\{\s*+and\s*+\}|\\land(?![A-Za-z])|\\wedge(?![A-Za-z])|\band\b)"
)
_VARIABLE = re.compile(r"(?:[A-Za-z]|\\[a-z]{2,8}\b)(?:_(?:[A-Za-z0-9]|\{[^{}]{1,20}\}))?")
_MEMBER = re.compile(rf"({_VARIABLE.pattern})\s*+\\in(?![A-Za-z])\s*+(.+)", re.DOTALL)
_BUILDER = re.compile(
    rf"\\\{{\s*+({_VARIABLE.pattern})(?:\s*+\\in\s*+\\mathbb\s*+(?:\{{R\}}|R))?\s*+(?:\\mid(?![A-Za-z])|[:|])"
    r"(.+)\\\}",
    re.DOTALL,
)
_SET = re.compile(r"[\[(]|\\\{|\\mathbb|\\emptyset")
_WHOLE_LINE = re.compile(
    r"(?:\\text\s*+\{)?\s*+all\s++real(?:\s++(?:numbers?|values?))?\s*+\}?|\\mathbb\s*+(?:\{R\}|R)",
    re.IGNORECASE,
)


def _relation(match: re.Match[str]) -> str:
    if match[2]:
        return match[2]
    return {"lt": "<", "gt": ">"}.get(match[1]) or _KIND[match[1][0]]


def _chain(text: str) -> tuple[list[str], list[str]]:
    """The sides of a chain of inequalities, and what stands between them."""
    sides, kinds, last = [], [], 0
    for match in _RELATION.finditer(text):
        sides.append(text[last : match.start()].strip())
        kinds.append(_relation(match))
        last = match.end()
    return [*sides, text[last:].strip()], kinds


def _half_line(kind: str, bound: str) -> tuple[str, str] | str:
    """Lower or upper end; a set for an inequation."""
    match kind:
        case "<":
            return ("", f"{bound})")
        case "<=":
            return ("", f"{bound}]")
        case ">":
            return (f"({bound}", "")
        case ">=":
            return (f"[{bound}", "")
    return rf"(-\infty,{bound})\cup({bound},\infty)"


_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


def _piece(text: str) -> tuple[str, str] | None:
    """The variable and the set of inequalities that hold together."""
    name, low, high = "", "", ""
    for part in _AND.split(text):
        sides, kinds = _chain(part)
        if len(sides) == 2 and _VARIABLE.fullmatch(sides[0]):
            found = [(sides[0], kinds[0], sides[1])]
        elif len(sides) == 2 and _VARIABLE.fullmatch(sides[1]):
            found = [(sides[1], _TURNED[kinds[0]], sides[0])]
        elif len(sides) == 3 and _VARIABLE.fullmatch(sides[1]) and kinds[0][0] == kinds[1][0]:
            found = [(sides[1], _TURNED[kinds[0]], sides[0]), (sides[1], kinds[1], sides[2])]
        else:
            return None
        for variable, kind, bound in found:
            ends = _half_line(kind, bound)
            if not bound or "," in bound or "=" in bound or (name and variable != name):
                return None
            name = variable
            if isinstance(ends, str):
                return (name, ends) if len(_AND.split(text)) == 1 else None
            if (ends[0] and low) or (ends[1] and high):
                return None
            low, high = low or ends[0], high or ends[1]
    return name, ",".join([low or r"(-\infty", high or r"\infty)"])


def as_set(text: str) -> tuple[str, str] | None:
    r"""The variable and the set of ``-1 < x \le 6``, ``x < 2 or x > 3``, ``x \in [-2, 7]``.

    Returns:
        The set as a union of intervals; None for what is no inequality in one variable.
    """
    builder = _BUILDER.fullmatch(text)
    if builder:  # {x | x > 5}
        inside = as_set(builder[2].strip()) if r"\{" not in builder[2] else None
        return inside if inside and inside[0] == builder[1] else None
    match = _MEMBER.fullmatch(text)
    if match:
        return match[1], match[2]
    if not _RELATION.search(text):
        return None
    pieces = [_piece(part) for part in _OR.split(text)]
    names = {piece[0] for piece in pieces if piece}
    if len(names) != 1 or not all(pieces):
        return None
    return names.pop(), r"\cup".join(piece[1] for piece in pieces if piece)


def _is_set(text: str) -> bool:
    return _SET.match(text) is not None and not _RELATION.search(text)


def _by_relation(gold: str, found: str, same: Same) -> bool | None:
    one, other = as_set(gold), as_set(found)
    whole = r"(-\infty,\infty)"
    line = [_WHOLE_LINE.fullmatch(text) is not None for text in (gold, found)]
    if any(line):
        left = whole if line[0] else one[1] if one else gold
        right = whole if line[1] else other[1] if other else found
        return left == right or same(left, right)
    if one is not None and other is not None:
        # math-verify compares simple ones itself
        return one[1] == other[1] or same(one[1], other[1]) if one[0] == other[0] else None
    if one is not None and _is_set(found):
        return one[1] == found or same(one[1], found)
    if other is not None:
        if _is_set(gold):
            return other[1] == gold or same(gold, other[1])
        return None if _MEMBER.fullmatch(found) else False
    sides, kinds = _chain(found)
    if kinds and not sides[0]:  # "> 204"
        others, gold_kinds = _chain(gold)
        return gold_kinds == kinds and not others[0] and same(others[-1], sides[-1])
    return None
