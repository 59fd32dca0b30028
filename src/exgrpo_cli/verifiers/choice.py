"""Multiple choice: letters A to J."""

from __future__ import annotations

import re
import unicodedata

from exgrpo_cli.verifiers import Verdict, judged
from exgrpo_cli.verifiers.extract import last_boxed

_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|sf|it|tt)|boldsymbol|bm|pmb|emph|underline"
    r"|mbox|boxed|fbox)\s*+\{([^{}]*+)\}"
)
_NOISE = re.compile(r"\\(?:left|right|quad|[ ,;:!()\[\]])|[$*_`{}~]|\\$")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s++)?(?:the\s++|my\s++)?"
    r"(?:(?:final|correct|right|best|chosen)\s++)*+(?:options?|choices?|answers?|letters?|ans)\b"
    r"(?:\s++(?:option|choice|letter)\b)?\s*+(?:is|are|would be|must be|:|=|-|\.)?\s*+:?\s*+"
    r"(?:(?:the\s++)?(?:options?|choices?|letters?)\b\s*+:?\s*+)?",
    re.IGNORECASE,
)
_SO = re.compile(r"(?:so|thus|hence|therefore),?\s++(?=[(\[]?[A-J][)\]]?\.?\Z)", re.IGNORECASE)
_CJK_LEAD = re.compile(
    r"(?:(?:所以|因此|故),?\s*+)?(?:正[确確]的?)?(?:答案|选项|選項)?(?:应|應)?"
    r"(?:选择|選擇|选|選|是|为|為)?(?:选项|選項)?\s*+:?\s*+(?=[(\[]?\s*+[A-J](?![A-Za-z]))"
)
_CJK_END = re.compile(r"(?<=[A-J])\s*+(?:选项|選項|项|項)\Z")
_CJK_MARKS = str.maketrans("。、【】", ".,[]")
_QUOTES = "\"'“”‘’「」"
# The text of an option that names others: "D. A and B".
_OF_OTHERS = re.compile(
    r"(?:\(([A-J])\)|([A-J])[.):])\s+[A-J](?:\s*,\s*(?:and\s+|or\s+)?[A-J]|\s+(?:and|or)\s+[A-J])+\.?"
)
_REFUTED = re.compile(
    r"\W{0,3}(?:(?:which\s+)?is\s+(?:(?:clearly|also|obviously|actually)\s+)?(?:not|never)\b"
    r"|(?:(?:which\s+)?is\s+)?(?:(?:clearly|also|obviously|actually)\s+)?"
    r"(?:wrong|incorrect|false|invalid|impossible|ruled\s+out|eliminated|excluded)\b)",
    re.IGNORECASE,
)
# "B", "(B)", "[B]", "B.", "B) 12 m", "(B) 12 m", "B - 12", "B: ...", "B because ...". A letter that
# another word follows ("A man walks") is none.
_LETTER = re.compile(
    r"[(\[<]{1,2}\s*([A-J])\s*[)\]>]{1,2}(.*)"
    r"|([A-J])\s*(|[.:;)](?:\s.*|$)|[.)](?=[-\d\\]).*|\s+[-=]\s.*|,\s.*|\s+(?:because|since|as|for)\b.*"
    r"|,?\s+(?:is|which is)\b.*|\s+\(.*\)\.?)",
    re.DOTALL | re.IGNORECASE,
)
_ONE = r"(?:[(\[]\s*[A-J]\s*[)\]]|[A-J](?![A-Za-z0-9]))\.?"
_JOIN = r"(?:\s*(?:,|;|/|&|\+)\s*(?:and\s+|or\s+)?|\s+(?:and|or)\s+|\s+)"
_SEVERAL = re.compile(rf"{_ONE}(?:{_JOIN}{_ONE})+\.?", re.IGNORECASE)
_MORE = re.compile(rf"\s*(?:[,;]?\s*(?:and|or|not)\b|[,;/&+]\s*{_ONE}(?!\w))", re.IGNORECASE)
_RUN = re.compile(r"[A-J]{2,10}")


def letters(text: str) -> str | None:
    r"""The letters A to J that an answer names, in upper case and alphabetical; None for none.

    Understood are ``B``, ``b``, ``(B)``, ``B.``, ``B) text``, ``B - 12``, ``**B**``, ``\text{B}``,
    ``$B$``, a full-width B, ``Answer: B``, ``The correct option is B.``, and several: ``AC``,
    ``A, C``, ``A and C``, ``(A) or (C)``.
    """
    text = unicodedata.normalize("NFKC", last_boxed(text) or text)
    for _ in range(3):  # \textbf{\text{B}}
        text = _COMMAND.sub(r" \1 ", text)
    text = _NOISE.sub(" ", text).translate(_CJK_MARKS).replace("–", "-").replace("—", "-")
    text = " ".join(text.split()).strip(_QUOTES)
    for pattern in (_LEAD, _SO, _CJK_LEAD):
        lead = pattern.match(text)
        if lead and lead.end() < len(text):
            text = text[lead.end() :].strip(_QUOTES)
    text = _CJK_END.sub("", text)
    others = _OF_OTHERS.fullmatch(text)
    if others:
        return others[1] or others[2]
    if _RUN.fullmatch(text) and len(set(text)) == len(text):
        return "".join(sorted(text))
    if _SEVERAL.fullmatch(text):
        found = re.findall(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])", text)
        return "".join(sorted({letter.upper() for letter in found}))
    match = _LETTER.fullmatch(text)
    if match is None:
        return None
    rest = match[2] if match[1] else match[4]
    if _MORE.match(rest) or _REFUTED.match(rest) or _labels_another(rest):
        return None
    return (match[1] or match[3]).upper()


def _labels_another(rest: str) -> bool:
    """Whether what follows a letter labels another one alike: ``A = 12, B = 13``."""
    mark = rest.lstrip()[:1]
    return mark in ("=", ":", ")") and bool(
        re.search(rf"(?:[,;]|\b(?:and|or)\b)\s[A-J]\s?{re.escape(mark)}", rest)
    )


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether both name the same letters; ``unparsable`` when the gold names none."""
    gold = letters(answer)
    if gold is None:
        return Verdict("unparsable", why="the gold answer is no letter from A to J")
    found = letters(extracted)
    correct = gold == found
    why = "the same letter" if correct else f"{found or 'no letter'}, not {gold}"
    return judged(correct, why, gold, found) if explain else judged(correct, why)


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if letters(answer) else "it is no letter from A to J"
