"""Equal text, white space aside."""

from __future__ import annotations

from exgrpo_cli.verifiers import Verdict, judged


def normalise(text: str) -> str:
    """Stripped, each run of white space one blank; case is kept."""
    return " ".join(text.split())


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether the texts are equal after :func:`normalise`; ``unparsable`` for an empty gold."""
    gold, found = normalise(answer), normalise(extracted)
    if not gold:
        return Verdict("unparsable", why="the gold answer is empty")
    correct = gold == found
    why = "the same text" if correct else "another text"
    return judged(correct, why, gold[:500], found[:500]) if explain else judged(correct, why)


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if normalise(answer) else "it is empty"
