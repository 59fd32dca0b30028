"""Verifiers: whether a response's final answer is right.

:mod:`extract` finds the final answer in a response, :mod:`math`, :mod:`choice`, :mod:`exact` and
:mod:`numeric` compare it with the gold answer, and :mod:`pool` runs them in worker processes with
hard time limits. :mod:`reasoning_gym` asks that library's scorers. A user's own function,
``path.py:function``, is a verifier too (:mod:`function`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from exgrpo_cli.errors import InputError

BUILT_IN = ("math", "math_verify", "choice", "exact", "numeric", "reasoning_gym")
"""The verifiers that need no file."""

STATUSES = ("ok", "no_answer", "no_format", "unparsable", "timeout", "error")
"""``ok``: judged, right or wrong. ``no_answer``: none in the response. ``no_format``: not in the
format that ``verify.require`` asks for, so not judged. ``unparsable``: the *gold* answer cannot be
read (an answer that cannot be read is ``ok`` and wrong). ``timeout``: the time limit passed and the
worker was killed. ``error``: the worker failed or ran out of memory."""

_FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Verdict:
    """What a verifier says about one answer."""

    status: str
    """One of :data:`STATUSES`."""
    reward: float = 0.0
    correct: bool = False
    seconds: float = 0.0
    """Time in the worker, loading and queueing not counted; 0 where none was asked."""
    why: str = ""
    """One line for people; empty where there is nothing to say."""
    parsed_answer: str | None = None
    """How the gold answer was understood; only where an explanation was asked for."""
    parsed_extracted: str | None = None
    """How the response's answer was understood; likewise."""


def judged(correct: bool, why: str, gold: str | None = None, found: str | None = None) -> Verdict:
    """The verdict of a comparison, and how both sides were read."""
    return Verdict(
        "ok", float(correct), correct, why=why, parsed_answer=gold, parsed_extracted=found
    )


def is_function(verifier: str) -> bool:
    """Whether the verifier is a user's function, ``path.py:function``."""
    return _FUNCTION.fullmatch(verifier) is not None


def takes_metadata(verifier: str) -> bool:
    """Whether it is given the problem's metadata, and knows itself what its golds mean."""
    return verifier == "reasoning_gym" or is_function(verifier)


def split_function(verifier: str) -> tuple[Path, str]:
    """The file and the function's name of ``path.py:function``."""
    match = _FUNCTION.fullmatch(verifier)
    if match is None:
        raise ValueError(f"{verifier!r} is not path.py:function")
    return Path(match["path"]), match["name"]


def check_verifier(verifier: str) -> None:
    """Refuse a verifier that cannot be, before any worker starts."""
    if verifier == "reasoning_gym" and find_spec("reasoning_gym") is None:
        raise InputError(f"verifier {verifier} is not installed; run: pip install reasoning-gym")
    if verifier in BUILT_IN:
        return
    if not is_function(verifier):
        known = ", ".join(BUILT_IN)
        raise InputError(f"unknown verifier {verifier!r}; known are {known}, or path.py:function")
    path, _ = split_function(verifier)
    if not path.is_file():
        raise InputError(
            f"verifier {verifier}: no such file {path}; a relative path is taken from the folder"
            f" where the command runs, now {Path.cwd()}"
        )


def allowed_verifier(verifier: str, trusted: Collection[str], where: str) -> None:
    """Refuse a user's function that only data names: a table must not choose code that runs.

    Args:
        verifier: what a row names. Built-in ones may be named by anyone.
        trusted: what the command line or the recipe names, text for text.
    """
    if is_function(verifier) and verifier not in trusted:
        raise InputError(
            f"{where}: the data names verifier {verifier}, a file of code; it runs only where"
            f" --verifier or the recipe's problems.verifier names it too, just so"
        )
