"""Equal text, white space aside."""

from __future__ import annotations

from exgrpo_cli.verifiers import Verdict


def normalise(text: str) -> str:
    """Stripped, each run of white space one blank; case is kept."""
    return " ".join(text.split())


def judge(answer: str, extracted: str, explain: bool = False) -> Verdict:
    """Whether the texts are equal after :func:`normalise`; ``unparsable`` for an empty gold."""
    gold, found = normalise(answer), normalise(extracted)
    if not gold:
        return Verdict("unparsable", why="the gold answer is empty")
    correct = gold == found
    return Verdict(
        "ok",
        reward=float(correct),
        correct=correct,
        why="the same text" if correct else "another text",
        parsed_answer=gold[:500] if explain else None,
        parsed_extracted=found[:500] if explain else None,
    )


def check_gold(answer: str) -> str | None:
    """Why the gold answer cannot be judged against; None when it can."""
    return None if normalise(answer) else "it is empty"
