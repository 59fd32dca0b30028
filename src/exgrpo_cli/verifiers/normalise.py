r"""Other spellings of the same answer, made one: of golds and answers alike, before math-verify.

Each rule is a function of the text alone, takes time linear in it, and leaves what it does not
know. ``docs/verifiers.md`` gives the reason of each; ``tests/verifiers/test_normalise.py`` has its
cases.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[a-z]")
"""Texts that no rule changes."""

# --- characters

_GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu",
    "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
]  # fmt: skip
_CHARACTERS = {
    **dict.fromkeys("‐‑‒–—―−﹣－", "-"), "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "∕": "/", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "∈": r"\in ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∖": r"\setminus ",
    "√": r"\sqrt ", "∛": r"\sqrt[3]", "∠": r"\angle ", "∨": r"\lor ", "∧": r"\land ",
    "…": r"\ldots ", "⋯": r"\cdots ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ",
    "℃": r"^\circ C", "℉": r"^\circ F", "⟨": r"\langle ", "〈": r"\langle ", "⟩": r"\rangle ",
    "〉": r"\rangle ", "、": ",", "。": ".", "【": "[", "】": "]", "′": "'", "’": "'", "‘": "'",
    "“": '"', "”": '"', "ε": r"\varepsilon ", "ϕ": r"\phi ", "¢": "",
}  # fmt: skip
_RAISED = {"⁺": "+", "⁻": "-", "ⁿ": "n", "ⁱ": "i"}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_COUNTERS = re.compile(
    r"(?<=\d)\s*+(?:元|円|원|個|个|人|度|名|명|개|厘米|米|千克|公斤|分钟|小时|天|岁|种|次|页)\s*+\Z"
)
_ROOT = re.compile(r"√\s*+([0-9]+(?:\.[0-9]+)?)")


@lru_cache(maxsize=4096)
def _character(character: str) -> str:
    if character.isascii():
        return character
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    category = unicodedata.category(character)
    if category == "Cf":  # zero-width ones
        return ""
    if category in ("Zs", "Zl", "Zp"):
        return " "
    compatible = unicodedata.normalize("NFKC", character)
    if "\N{FRACTION SLASH}" in compatible:
        above, _, below = compatible.partition("\N{FRACTION SLASH}")
        return f"\\frac{{{above}}}{{{below}}}" if below else character
    if compatible.isascii():  # full width, mathematical alphabets
        return compatible
    if category == "Sc":
        return r"\$"
    words = unicodedata.name(compatible[0], "").lower().split()
    if words[:3] == ["greek", "small", "letter"] and words[-1] in _GREEK:
        return f"\\{words[-1]} "
    if words[:3] == ["greek", "capital", "letter"] and words[-1] in _GREEK:
        return f"\\{words[-1].title()} "
    return character


def _raised(match: re.Match[str]) -> str:
    return "^{" + "".join(_RAISED.get(c) or str(unicodedata.digit(c)) for c in match[0]) + "}"


def _lowered(match: re.Match[str]) -> str:
    return "_{" + "".join(str(unicodedata.digit(c)) for c in match[0]) + "}"


def _characters(text: str) -> str:
    if text.isascii():
        return text
    text = _COUNTERS.sub("", text)
    text = _ROOT.sub(r"\\sqrt{\1}", _SUBSCRIPT.sub(_lowered, _SUPERSCRIPT.sub(_raised, text)))
    return "".join(map(_character, text))


# --- how it is set

_MATH = re.compile(r"\\\\|\\\$|\\[()\[\]]|\$")
_SPACING = re.compile(
    r"\\\\|(?<=[0-9])(?:,\\!|\{,\})\s*+(?=[0-9]{3}(?![0-9]))"
    r"|\\!\s*+|\\[,;:> ]|\\[hv]space\*?\{[^{}]*+\}"
    r"|\\(?:q?quad|enspace|thinspace|enskip|nobreakspace)(?![A-Za-z])|\\$|~|[\t\n\r\f\v]"
)
_SIZES = re.compile(r"\\(?:(?:left|right|middle)(?![A-Za-z])\.?|[bB]igg?[lrm]?(?![A-Za-z]))\s*+")
_STYLES = re.compile(
    r"\\(?:(?:display|text|script|scriptscript)style|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)"
    r"(?![A-Za-z])\s*+|\\(?:text)?color\s*+\{[A-Za-z]++\}\s*+"
)
_BRACKETS = re.compile(r"\\([lr])(angle|brace|brack|paren)(?![A-Za-z])\s*+")
_BRACKET = {"angle": "()", "brace": (r"\{", r"\}"), "brack": "[]", "paren": "()"}
_STARS = re.compile(r"(\*{1,3}|`|__)(?!\s)(.+?)\1", re.DOTALL)


def _spacing(match: re.Match[str]) -> str:
    token = match[0]
    if token == r"\\":
        return token
    return "" if token[0] in ",{" or token.startswith(r"\!") else " "


def _setting(text: str) -> str:
    if text[:1] in "*`_":
        match = _STARS.fullmatch(text)
        text = match[2] if match else text
    if "\\" in text or "$" in text or "~" in text or "{,}" in text or not text.isprintable():
        text = _MATH.sub(lambda m: m[0] if m[0] in (r"\\", r"\$") else "", text)
        text = _SPACING.sub(_spacing, text)
        if "\\" in text:
            text = _STYLES.sub("", _SIZES.sub("", text))
            text = _BRACKETS.sub(lambda m: _BRACKET[m[2]][m[1] == "r"], text)
            text = text.replace("smallmatrix", "matrix")
    return text.strip()


# --- wrappers

_BOLD = re.compile(
    r"\\(?:boldsymbol|bm|pmb|bold|mathbf|mathit|mathsf|mathtt|mathnormal|fbox|boxed)\s*+\{"
    r"|\\.|[{}]",
    re.DOTALL,
)
_BOLD_START = re.compile(r"\\(?:b|pm|math[bistn]|fb)")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md)?|emph|underline|mbox|hbox|mathrm)\s*+"
    r"\{((?:[^{}]|\{[^{}]*+\})*+)\}"
)
# math-verify takes a word that ends the text for a unit, also in a subscript.
_SUBSCRIPT_WORD = re.compile(
    r"_\s*+(?:\\(?:text|mathrm)\s*+\{\s*+([A-Za-z]+)\s*+\}"
    r"|\{\s*+\\(?:(?:text|mathrm)\s*+\{\s*+([A-Za-z]+)\s*+\}|(max|min|sup|inf|odot|oplus))\s*+\})"
)
_LABEL = re.compile(
    r"(?:so\s++|thus,?\s++|hence,?\s++)?(?:the\s++|my\s++)?(?:(?:final|correct)\s++)?answer\b"
    r"(?:\s*+:|\s++is\b:?)\s*+(?=\S)",
    re.IGNORECASE,
)


def _unwrap_bold(text: str) -> str:
    r"""``\boldsymbol{x}`` is ``x``, in braces where these group."""
    if not _BOLD_START.search(text):
        return text
    parts: list[str] = []
    opened: list[int | None] = []  # of a wrapper: where its brace stands in parts
    last = 0
    for match in _BOLD.finditer(text):
        token = match[0]
        parts.append(text[last : match.start()])
        last = match.end()
        if len(token) > 2 and token[-1] == "{":
            before = text[max(0, match.start() - 1) : match.start()]
            opened.append(len(parts))
            # also apart from a command before it: `\cdot\mathbf{x}`
            parts.append("{" if before and before in "^_}]" else " " if before.isalpha() else "")
            continue
        if token == "{":
            opened.append(None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                if parts[start] == "{" or text[last : last + 1] in ("^", "_", "!"):
                    parts[start] = "{"
                else:
                    token = ""
        parts.append(token)
    if any(start is not None for start in opened):  # never closed
        return text
    return "".join([*parts, text[last:]])


def _text(match: re.Match[str]) -> str:
    inner = match[1].strip()
    if re.match(r"[-+(]?\s?(?:\\?\$)?[0-9.\\]", inner) or not re.search("[A-Za-z]", inner):
        return match[1]  # what is no word needs no wrapper: \text{5}, \text{5 cm}, \textbf{\pi}
    if inner in ("i", "e") and match[0].startswith(r"\mathrm"):  # the constants
        start, end = match.span()
        before, after = match.string[max(0, start - 1) : start], match.string[end : end + 1]
        return " " * before.isalpha() + inner + " " * after.isalpha()
    if re.fullmatch(r"\(?[A-Za-z]\)?", inner) or match[0].startswith(r"\mathrm"):
        return match[0]
    return f"\\text{{{match[1]}}}"


def _wrappers(text: str) -> str:
    if "\\" in text:
        text = _unwrap_bold(text)
        if "text" in text or "box" in text or "mathrm" in text or "emph" in text or "und" in text:
            text = _TEXT.sub(_text, text)
        if "_" in text:
            text = _SUBSCRIPT_WORD.sub(lambda m: f"_{{{m[1] or m[2] or m[3]}}}", text)
    if "nswer" in text or "NSWER" in text:
        label = _LABEL.match(text) or re.match(
            r"\\text\{" + _LABEL.pattern.removesuffix(r"(?=\S)") + r"\}\s*+", text, re.IGNORECASE
        )
        text = text[label.end() :] if label else text
    return text.strip()


# --- money, degrees, units

_CURRENCY = re.compile(
    r"(?<![A-Za-z])(?:(?:US|A|C|HK|NZ|S)?\s?\\\$|\\(?:pounds|euro|texteuro|textsterling|yen)(?![A-Za-z])"
    r"|(?:USD|EUR|GBP|CNY|RMB|INR|JPY|Rs\.?)(?=\s*+-?[0-9.]))\s*+"
)
_DEGREE = re.compile(
    r"(?:\s*+\^\s*+(?:\{\s*+\\circ\s*+\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z]))"
    r"(?:\s*+(?:\\(?:text|mathrm)\s*+\{\s*+[CFK]\s*+\}|[CFK](?![A-Za-z])))?"
)
_ANGULAR = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis|angle)(?![a-z])")
_NOT_A_UNIT = (
    r"and|or|if|for|when|where|with|is|are|not|no|in|base|mod|thousand|million|billion|trillion"
    r"|halves|half|thirds?|quarters?|[a-z]{3,9}ths?|factorial|squared|cubed|minus|plus|over|times"
    r"|divided|dozen|percent|percentage|pct|less|more|than|least|most|wrong|per cent|hundred"
)
_ENDS = r"(?=\s*+(?:$|[,;)\]&]|\\[\\}]|\.\s*+$))"
_UNIT = r"\\(?:text|mathrm|mbox)\s*+\{(?:[^{}]*+)\}(?:\s*+\^\s*+(?:\{\s*+-?[0-9]\s*+\}|-?[0-9]))?"
_UNITS = re.compile(
    rf"(?<=[0-9}})\].])\s*+(?:\\cdot\s*+|/\s*+)?(?:{_UNIT}|\\frac\{{{_UNIT}\}}\{{{_UNIT}\}})"
    rf"(?:\s*+(?:/|\\cdot|\\times|\*)?\s*+{_UNIT}){{0,6}}{_ENDS}"
)
_UNIT_WORD = (
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s++[a-z]+"
    r"|(?:[numcdk]?m|\\mu\s*+m|(?<=\s)(?:in|mi|ms|oz|mm|Hz)|ft|yd|[km]?g|lbs?|s|secs?|min|hrs?|yrs?"
    r"|m?L|ml|kJ|[kM]W|kV|[kM]?Pa|[kMG]Hz|[kMG]?eV|mol|rad|deg|mph|kmh|kph|USD|EUR|GBP|CNY|RMB)"
    r"(?:\s?\^\s?(?:\{-?[0-9]\}|[0-9]))?(?:/(?:[mck]?m|s|h|hr|min|k?g|L|mol)"
    r"(?:\s?\^\s?(?:\{[0-9]\}|[0-9]))?)?)"
)
# A single letter is a variable as often as a unit; math-verify decides about it.
_WORD_UNITS = re.compile(
    rf"(?<=[0-9}})\]])\s*+(?![A-Za-z](?![A-Za-z/])){_UNIT_WORD}(?![A-Za-z0-9_^(]){_ENDS}"
)
_NOT_A_NOUN = (
    rf"{_NOT_A_UNIT}|incorrect|false|sqrt|infinity|theta|alpha|beta|gamma|delta|epsilon|zeta|kappa"
    r"|lambda|sigma|omega|hundred"
)
# Three letters with a blank before them may be variables, too; these are words.
_SHORT_NOUNS = (
    r"(?:men|day|way|cup|cow|dog|cat|egg|pen|car|bag|hen|pig|bit|boy|toy|box|cent)s?|boxes|yen|won"
)
_NOUNS = re.compile(
    r"(-?[0-9][0-9.,]*+(?: [0-9]{3})*+(?:/[0-9]+|\s++[0-9]+/[0-9]+)?"
    r"|-?[0-9]*+\s*+\\[dt]?frac\{[0-9]+\}\{[0-9]+\})"
    rf"\s++(?!(?:[a-z\s]*\s)?(?:{_NOT_A_NOUN})(?![a-z]))"
    rf"(?:(?=[a-z\s]*[aeiouy])[a-z]{{4,}}|{_SHORT_NOUNS})(?:\s++[a-z]{{2,}}){{0,4}}",
    re.IGNORECASE,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    r"(?<=[0-9])\s*+(?:\\text\s*+\{\s*+)?(hundred|thousand|million|billion|trillion)\b"
    r"[A-Za-z ]*+\}?\s*+$",
    re.IGNORECASE,
)


def _is_unit(match: re.Match[str]) -> str:
    inner = " ".join(re.findall(r"\{([^{}]*)\}", match[0]))
    if re.search(rf"\b(?:{_NOT_A_UNIT})\b", inner, re.IGNORECASE) or "%" in inner:
        return match[0]
    return ""


def _scaled(match: re.Match[str]) -> str:
    return rf" \times 10^{{{_SCALES[match[1].lower()]}}}"


def _units(text: str) -> str:
    if "$" in text or "\\" in text or "R" in text or "U" in text or "P" in text or "Y" in text:
        text = _CURRENCY.sub("", text)
    if ("circ" in text or "degree" in text) and not _ANGULAR.search(text):
        text = _DEGREE.sub("", text)
    if "ill" in text or "thou" in text or "hund" in text:
        text = _SCALE.sub(_scaled, text)
    if "\\" in text:
        text = _UNITS.sub(_is_unit, text)
        # A single letter in \text is that letter where it is no unit.
        text = re.sub(r"\\text\s*+\{\s*+\(?([A-Za-z])\)?\s*+\}", r"\1", text)
    if text[-1:].isalpha() or ")" in text or "]" in text or "}" in text[-2:] or "," in text:
        text = _WORD_UNITS.sub("", text)
        nouns = _NOUNS.fullmatch(text.rstrip(" ."))
        text = nouns[1] if nouns else text
    elif text[-1:].isdigit() and "^" in text:
        text = _WORD_UNITS.sub("", text)
    return text.strip()


# --- numbers

_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9.\\_}])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE]|\s?\\(?:text|mathrm)\{[eE]\}\s?)([+-]?)0*([0-9]{1,4})(?![A-Za-z0-9.^])"
)
_POWER = re.compile(
    r"(?<=[0-9])\s*+(?:\\times|\\cdot|[*xX])\s*+10\s*+(?:\^|\*\*)\s*+"
    r"(?:\{\s*+([+-]?)\s*+([0-9]+)\s*+\}|\(\s*+([+-]?)([0-9]+)\s*+\)|([+-]?)([0-9]+))"
)
_SIGNED_POWER = re.compile(r"(?:\^|\*\*)\s*+([+-][0-9]+)")
_POINT = re.compile(r"(?<![0-9.][.])(?<=[0-9])\.(?=\s*+[-+/*,;)\]}]|\s*+\\)")
_MIXED = re.compile(
    r"(?<![A-Za-z0-9.,^_/}\\])([0-9]+)(?:\s++and)?\s++([0-9]{1,9})\s*+/\s*+([0-9]{1,9})(?![A-Za-z0-9./^_])"
)
_GROUPED = re.compile(
    r"(?<![A-Za-z0-9.,^_/}\\])(?<!frac )(?<!sqrt )(?<!binom )"
    r"([0-9]{1,3}(?: [0-9]{3})+)(?![A-Za-z0-9_])"
)
_COMMAS = re.compile(
    r"((?:[^,=]*+(?:=|\\approx))*+\s*+[-+]?)([1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?)(\s*+[A-Za-z%\\][^,]*+)?"
)
_TIMES = re.compile(r"(?<![A-Za-z0-9_^{}.\\])([0-9]+)\s*+\((?=\s*+[-0-9])")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar|dot)\s*+\{([0-9]{1,9})\}"
)
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_ASCII = {"<=": r"\le ", ">=": r"\ge ", "!=": r"\neq ", "**": "^"}
_OPERATOR = re.compile(r"<=|>=|(?<![0-9)!])!=|(?<=[A-Za-z0-9)}])\s?\*\*\s?(?=[A-Za-z0-9({\\+-])")
_SQRT = re.compile(r"(?<![A-Za-z\\])sqrt\(([^()]*+)\)")
_RAISED_TO = re.compile(r"(?<=[A-Za-z0-9)}])\s?\*\*\s?([0-9]+\.[0-9]+|[0-9]{2,})")
_OUTWARD = re.compile(r"([\[(\]])([^\[\]]*,[^\[\]]*)([\[)\]])")
_ENERGY = re.compile(r"(?<![A-Za-z\\])E_(?=[A-Za-z0-9{\\])")
_LEADING = re.compile(
    r"(?:=|\\(?:approx|simeq|sim|equiv|therefore|implies|(?:Longr|R)ightarrow)(?![A-Za-z]))\s*+"
)


def _power(match: re.Match[str]) -> str:
    sign = match[1] or match[3] or match[5] or ""
    digits = match[2] or match[4] or match[6]
    return rf" \times 10^{{{sign.strip('+')}{digits}}}"


def _scientific(match: re.Match[str]) -> str:
    return rf"{match[1].rstrip('.')} \times 10^{{{match[2].strip('+')}{match[3]}}}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return rf"{whole}\frac{{{above}}}{{{below}}}" if 0 < int(above) < int(below) else match[0]


def _numbers(text: str) -> str:
    if "e" in text or "E" in text:
        text = _SCIENTIFIC.sub(_scientific, text)
    if "^" in text or "**" in text:
        text = _SIGNED_POWER.sub(r"^{\1}", _POWER.sub(_power, text))
    if "." in text:
        text = _POINT.sub("", _REPEATING.sub(_repeating, text))
    if " " in text:
        text = _GROUPED.sub(lambda m: m[1].replace(" ", ""), _MIXED.sub(_mixed, text))
    if "," in text:
        match = _COMMAS.fullmatch(text)
        if match:
            text = match[1] + match[2].replace(",", "") + (match[3] or "")
    if "(" in text:
        text = _TIMES.sub(r"\1\\cdot (", text)
    return text


def _operators(text: str) -> str:
    """ASCII as it is typed, and what the grammar of LaTeX does not know."""
    if "=" in text or "**" in text:
        text = _RAISED_TO.sub(r"^{\1}", text)
        text = _OPERATOR.sub(lambda m: _ASCII[m[0].strip()], text)
    if "sqrt(" in text:
        text = _SQRT.sub(r"\\sqrt{\1}", text)
    if "pi" in text:
        text = _PI.sub(r"\\pi ", text)
    if "E_" in text:  # which would be e
        text = _ENERGY.sub(r"\\mathcal{E}_", text)
    if "[" in text and (match := _OUTWARD.fullmatch(text)):  # ]0, 1[
        left, inner, right = match.groups()
        text = f"{'(' if left == ']' else left}{inner}{')' if right == '[' else right}"
    return text.replace(r"\varnothing", r"\emptyset")


def _ends(text: str) -> str:
    """Without a leading ``=`` and trailing punctuation."""
    match = _LEADING.match(text)
    if match:
        text = text[match.end() :]
    while text and text[-1] in ".,;: \\":
        if text.endswith(("..", r"\,..")) or text.endswith("\\ldots"):
            break
        text = text[:-1].rstrip()
    return text


RULES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("characters", _characters),
    ("setting", _setting),
    ("wrappers", _wrappers),
    ("ends", _ends),
    ("units", _units),
    ("operators", _operators),
    ("numbers", _numbers),
    ("ends again", _ends),
)
"""The rules in their order; the first "ends" is so that a unit stands last, the second for what
the others leave."""


def normalise(text: str) -> str:
    """The usual spelling of an answer, see :data:`RULES`. Plain numbers come back at once."""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    for _, rule in RULES:
        text = rule(text)
    return text.strip()
