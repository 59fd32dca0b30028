"""Multiple choice: one letter A to J."""

from __future__ import annotations

import re

from exgrpo_cli.verifiers import Verdict

_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|boxed)\s*\{([^{}]*)\}"
)
# "B", "(B)", "[B]", "B.", "B) 12 m", "(B) 12 m", "Option B: ...". A letter that a word follows
# ("A man walks") is none.
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s+)?"
    r"(?:[(\[]\s*([A-Ja-j])\s*[)\]](?:.*)|([A-Ja-j])\s*(?:$|[.,:;)](?:\s.*|$)))",
    re.DOTALL | re.IGNORECASE,
)


def letter(text: str) -> str | None:
    r"""The letter A to J that an answer names, in upper case; None when it names none.

    Understood are ``B``, ``b``, ``(B)``, ``B.``, ``B) text``, ``**B**``, ``\text{B}``, ``$B$``.
    """
    previous = None
    while text != previous:
        previous = text
        text = _COMMAND.sub(r"\1", text)
    text = text.replace("\\left", "").replace("\\right", "").strip().strip("$*_` \n\t")
    match = _LETTER.fullmatch(text)
    return (match[1] or match[2]).upper() if match else None


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether both name the same letter; ``unparsable`` when the gold names none."""
    gold = letter(answer)
    if gold is None:
        return Verdict("unparsable", why="the gold answer is no letter from A to J")
    found = letter(extracted)
    correct = gold == found
    return Verdict(
        "ok",
        reward=float(correct),
        correct=correct,
        why="the same letter" if correct else f"{found or 'no letter'}, not {gold}",
        parsed_answer=gold if explain else None,
        parsed_extracted=found if explain else None,
    )


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if letter(answer) else "it is no letter from A to J"
