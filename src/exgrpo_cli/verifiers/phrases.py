r"""Answers that running text states: "The answer is 5.", a line "Answer: 5", "答案是5。".

Every function here takes time linear in the text: what precedes and what follows a word is looked
at in windows of fixed size.
"""

from __future__ import annotations

import re

from exgrpo_cli.verifiers.boxes import opened, strip_answer

_WINDOW = 10_000  # characters of an answer; nobody says more
_TRIES = 100  # labels looked at, from the last on
_MENTIONS = 5_000  # words looked at that may be a label's, likewise

# --- where an answer is stated ------------------------------------------------------------------

_WORDS = (
    "answer",
    "ans:",
    "ans.",
    "final",
    "option",
    "choice",
    *"答选選故应應",
    *("最终", "最終", "最后", "最後"),
    "최종",
    "정답",
    "답",
)
_NOUN = re.compile(
    r"answers?(?![^\W_])|ans\b|final\s{1,3}(?:result|value|solution)\b|(?:option|choice)\b",
    re.IGNORECASE,
)
_CHOSEN_AFTER = re.compile(  # "option C is correct"
    r"\s{1,3}(?=[*(\[]{0,3}[A-J][*)\]]{0,3}\s{1,3}is\s{1,3}(?:the\s)?(?:correct|right|best)\b)"
)
_CHOSEN = ("correct", "right", "best", "final", "my")  # options
_IS = re.compile(
    r"(?:\s{1,3}(?:to|for|of)\s[^.:\n$]{1,100}?)?(?:,\s(?:then|therefore|thus|hence|of\scourse),)?"
    r"[\"'*_`})]{0,4}\s*+"
    r"(?:(?:is|are|equals|becomes|(?:must|should|would|will|can\s+only)\s+be)\b|=)",
    re.IGNORECASE,
)
_COLON = re.compile(r"[ \t]*+[\"'*_`})\]】]{0,6}[ \t]*+(?:[:：→⇒]|[-=]>)")
_ALONE = re.compile(
    r"(?:[^\w\n$\\(\[<]|_){0,20}(?:\n|\Z)"
)  # a heading: the answer is on a later line
_THEN_MATH = re.compile(r"[ \t]{0,3}(?=\$|\\[(\[]|\*\*\S)")
_CJK_ALONE = re.compile(r"答案(?:[^\w\n$\\(\[<]|_){0,20}\n")
_AT_THE_START = (_COLON, _ALONE, _THEN_MATH, _CJK_ALONE)  # of a line or a statement
_START = re.compile(  # of a line or a statement, up to the word
    r"(?:^|\n|[^\w\s,\-'’/<][ \t]{0,3})(?:[^\w\n<]|_){0,40}(?:\d{1,2}[.)]\s{0,3})?"
    r"(?:(?:so|thus|hence|therefore|then|finally|overall|in\s+conclusion),?\s{1,3})?"
    r"(?:(?:the|my|our|your)\s{1,3})?(?:(?:final|correct|short|numerical)[\s_]{1,3})?"
    r"(?:最[终終后後]的?|正[确確]的?)?\Z",
    re.IGNORECASE,
)
_CJK = re.compile(
    r"答案?[*_\s】\]」』》]{0,4}(?:(?:应该?|應該?|就|即|便|只能)?(?:是(?!否)|为|為|选|選|等于|等於)|[:：]|(?<=】))"
    r"|(?:故|应|應)?(?:应|應)?(?:选|選)(?:择|擇)?(?:项|項)?(?:是|为|為)?[:：\s]*(?=[(（*$]{0,3}[A-JＡ-Ｊ](?![A-Za-z]))"
    r"|最[终終后後]的?[结結]果(?:是|为|為|[:：])|答え[*_\s」』】]{0,4}(?:は|[:：])"
    r"|(?:최종\s?)?(?:정답|답)[*_\s]{0,4}(?:은|는|[:：])"
)

# --- what it is ---------------------------------------------------------------------------------

_SKIP = re.compile(  # between the label and the answer
    r"(?:[\s*_:：=>}\"“`】」』~]|approx\.(?=\s)|\\(?:[,;:! ]|q?quad\b)"
    r"|(?:-{3,}|#{1,6})[ \t]*+(?=\n|[*\w])"
    r"|(?:therefore|thus|hence|then|simply|just|exactly|indeed|clearly|approximately|about|roughly"
    r"|probably|(?:most\s+)?likely|now|actually|in\s+fact|indeed|instead|still|again"
    r"|equal\s+to|given\s+by|found\s+to\s+be|as\s+follows|that|option|choice)\b[,:]?(?=\s))*+",
    re.IGNORECASE,
)
_BLANKS = re.compile(r"[^\S\n]{2,}+")
_SPANS = (
    re.compile(r"\$\$(.+?)\$\$", re.DOTALL),
    re.compile(r"\\\[(.+?)\\\]", re.DOTALL),
    re.compile(r"\\\((.+?)\\\)", re.DOTALL),
    re.compile(r"\$((?:[^$\\\n]|\\.)+)\$(?!\d)"),
)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-z]{2,}")
_AND = re.compile(r"\s*(?:[,;、，；]\s*(?:and|or)?|and|or|&|和|或|与|與|및|と)\s*")
_BROKEN = re.compile(r"[-+*/=]\$\s*(?=\$)")  # a formula set in two
# After a formula: its unit, or more of the formula; all else is no part of the answer.
_UNIT = re.compile(r"\s*(?:\\?%|°|[a-zA-Z°²³]+(?:[ /^][a-zA-Z0-9²³]+){0,2})\s*")
_NO_UNIT = re.compile(
    r"\s*(?:as|since|because|which|where|when|if|for|by|with|so|and|or|but|is|are|in|at|from)\b"
)
_MORE = re.compile(r"\s*(?:[-+*/^<>=≤≥]|\\[a-z])")
_END = re.compile(
    r"(?<!\.)\.(?=\s|[*_\"”'`)}\]$]*(?:\s|\Z))|[。；！？]|．(?!\d)|\?(?=\s)|;\s+(?=[a-z]{2})"
    r"|\s+I hope (?:it|this|that) is correct|\n"
)
_CLAUSE = re.compile(
    r",?\s+(?:because|since|which|as)\s|,\s+(?:so|not|where|who|thus|hence|therefore|and\s+(?:so"
    r"|thus|hence|therefore))\s|[,，]\s*(?=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3])"
    r"|(?<=[A-J)\]*])\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
    r"|\s+\([A-Za-z]{2,}[^()$]*\)\s*\Z|\s+[—–]\s"
    r"|\s*是?正[确確]的?\s*\Z|\s*(?:です|である|だ|となる|(?:に|と)なります|입니다|이다)\s*\Z",
)
_BOLD_END = re.compile(r"\*\*+(?=[\s.,;:!?)\]}$。，]|\Z)")
_FORMULA = re.compile(r"[-+\d.$\\(\[{]|[a-zA-Z]\b")
_REMARK = re.compile(r",\s+(?!(?:and|or)\b)[a-z]{2}")  # "5, by symmetry"
_STATED = re.compile(r"[A-Za-z]{2}.*\b(?:is|are|equals|be)\b[\s*:]+(.+)", re.DOTALL)
_NAMED = re.compile(
    r"(?:the|an?)\s+(?:[a-z]+\s+)?(?:number|integer|value|fraction|ratio|point|interval|set|pair"
    r"|triple|vector|matrix|expression|function|polynomial|equation|letter|total\s+of)\s+"
    r"([-$\d(\[{\\*].*|[a-z]\s?=.*)",
    re.IGNORECASE | re.DOTALL,
)
_AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("'", "'"))
_NO_ANSWER = re.compile(
    r"(?:(?:not|what|how|whether|why|in|of|on|obtained|found|based|derived|given"
    r"|written|expressed|defined|shown)\b.*"
    r"|(?:indeed |also )?(?:(?:in)?correct|right|wrong|(?:in)?valid|reasonable|acceptable|possible"
    r"|consistent|unique|clear|unclear|unknown|verified|confirmed|below|above|as follows|here)"
    r"|(?:正确|对|错误|唯一|不正确)的?)",
    re.IGNORECASE | re.DOTALL,
)


def last_stated(text: str) -> tuple[int, str] | None:
    """The last answer that the text states.

    Returns:
        Where its label begins, and the answer: empty when the text ends before it is said; None
        when none is stated.
    """
    tries = _TRIES
    for start in _mentions(text)[: -_MENTIONS - 1 : -1]:
        label = _label(text, start)
        if label is None:
            continue
        begins = _START.search(text[max(0, start - 80) : start]) is not None
        found = _value(text, label.end()) if begins or label.re not in _AT_THE_START else None
        if found is not None:
            return start, found
        tries -= 1
        if not tries:
            break
    return None


def _mentions(text: str) -> list[int]:
    """Where the words are that a label may have, in order."""
    lower = text.lower()
    if len(lower) != len(text):  # as of "İ"; then the places are others
        lower = text
    places = []
    for word in _WORDS:
        place = lower.find(word)
        while place >= 0:
            places.append(place)
            place = lower.find(word, place + len(word))
    return sorted(places)


def _label(text: str, start: int) -> re.Match[str] | None:
    """What follows the label's noun, up to the answer, where this is a label."""
    if not text[start].isascii():
        return _CJK.match(text, start) or _CJK_ALONE.match(text, start)
    if text[start - 1 : start].isalnum():
        return None
    noun = _NOUN.match(text, start)
    if noun is None:
        return None
    if noun[0].lower() in ("option", "choice"):
        before = text[max(0, start - 12) : start].rstrip().lower()
        if not before.endswith(_CHOSEN):
            return _CHOSEN_AFTER.match(text, noun.end())
    for pattern in (_IS, _COLON, _ALONE, _THEN_MATH):
        match = pattern.match(text, noun.end())
        if match:
            return match
    return None


def _value(text: str, begin: int) -> str | None:
    """The answer after a label; empty when it was cut off, None when there is none."""
    skipped = _SKIP.match(text, begin)
    begin = skipped.end() if skipped else begin
    if begin == len(text):
        return ""
    window = _BLANKS.sub(" ", text[begin : begin + _WINDOW])
    found = _formulas(window)
    if found is None:
        if re.match(r"\$\$|\$\\|\\[(\[]", window):  # never closed
            return ""
        found = _words(window, begin + _WINDOW >= len(text))
    return opened(found) if found else found


def _span(text: str, begin: int) -> tuple[str, int] | None:
    """The formula that begins there and where it ends, in any of LaTeX's four notations."""
    for pattern in _SPANS:
        match = pattern.match(text, begin)
        if match is None:
            continue
        content = match[1]
        # "$5 and $6" is money
        if content[-1].isspace() and not content[0].isspace() and _PROSE.search(content):
            return None
        return tidy(content) or "", match.end()
    return None


def _formulas(window: str) -> str | None:
    """The formula that the text begins with, or a list of them, without their delimiters."""
    span = _span(window, 0)
    if span is None:
        return None
    items, end = [span[0]], span[1]
    while gap := _BROKEN.match(window, end - 2) or _AND.match(window, end):
        following = _span(window, gap.end())
        if following is None:
            break
        if gap.re is _BROKEN:
            items[-1] += " " + following[0]
        else:
            items.append(following[0])
        end = following[1]
    if len(items) == 1:
        stop = _END.search(window, end)
        tail = window[end : stop.start() if stop else len(window)]
        if _MORE.match(tail):
            return tidy(items[0] + tail.replace("$", ""))
        if _UNIT.fullmatch(tail) and not _NO_UNIT.match(tail):
            return items[0] + (tail if tail[0] == " " else tail.strip())
    answer = ", ".join(items)
    return answer if answer.strip(" .,") else None


def _words(window: str, whole: bool) -> str | None:
    """An answer in words or without LaTeX's delimiters, to the end of its statement."""
    stop = _END.search(window)
    if stop is None and not whole:
        return None  # no end in sight
    text = window[: stop.start() if stop else len(window)]
    bold = _BOLD_END.search(text)
    if bold and text.count("**") % 2:
        text = text[: bold.start()]
    named = _NAMED.match(text)
    stated = None if named else _STATED.fullmatch(text)
    if named or stated:
        inner = _SKIP.sub("", (named or stated)[1], count=1)  # type: ignore[index]
        return _formulas(inner) or _words(inner, True)
    clause = _CLAUSE.search(text, 1)
    text = text[: clause.start()] if clause else text
    remark = _REMARK.search(text)
    if remark and _FORMULA.match(text) and len(_PROSE.findall(text, 0, remark.start())) <= 1:
        text = text[: remark.start()]
    text = tidy(_balanced(text)) or ""
    if not text or _NO_ANSWER.fullmatch(text):
        return None
    if stop is None and text.count("{") > text.count("}"):
        return ""  # cut off within a formula
    parts = re.split(r"\s*,?\s+(?:and|or)\s+|\s*[、或和]\s*", text)
    return text if len(parts) == 1 or any(map(_PROSE.search, parts)) else ", ".join(parts)


def _balanced(text: str) -> str:
    """The text up to a delimiter that closes what was opened before it: the label stood in it."""
    depth = 0
    for match in re.finditer(r"\\[{}]|\\[\])]|[{}]", text):
        if match[0] in ("\\]", "\\)"):
            opening = "\\[" if match[0] == "\\]" else "\\("
            if opening not in text[: match.start()]:
                return text[: match.start()]
        elif match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth < 0:
                return text[: match.start()]
    if text.count("$") - text.count("\\$") == 1 and not re.match(r"\s*\\?\$", text):
        return text[: text.rindex("$")]
    if text.endswith("$$") and text.count("$") == 2:
        return text[:-2]
    if text.endswith((")", "）")) and not re.search(r"[(\[（]", text):
        return text[:-1]
    return text


def tidy(text: str) -> str | None:
    """An answer without emphasis, quotation marks, a full stop, or delimiters around all of it;
    None where nothing is left."""
    for _ in range(5):  # as deep as anybody wraps an answer
        text = text.strip().strip('*_`"“”「」『』').strip()
        bare = text.rstrip(".,;:。，；：．")
        if not bare.endswith("\\") and not text.endswith(".."):
            text = bare
        for left, right in _AROUND:
            inner = text[len(left) : len(text) - len(right)]
            whole = len(text) > len(left) + len(right)
            if whole and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner
    return strip_answer(text) if text.strip(". ") else None  # "..." is none
