"""Problems that reasoning-gym makes (arXiv 2505.24760): ``reasoning_gym:chain_sum,gcd``."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.problems.rows import Problem
from exgrpo_cli.problems.values import clean, dump
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.tables import row_seed
from exgrpo_cli.verifiers.reasoning_gym import OPEN_GOLD

PREFIX = "reasoning_gym:"
_OURS = ("seed", "size")
_TRIES = 5  # entries drawn for a question, where kinds repeat themselves


def generate(
    source: str,
    count: int,
    seed: int,
    options: Mapping[str, Any],
    verifier: str | None = None,
    log: Log = quiet,
) -> list[Problem]:
    """Make problems; the same arguments and version of reasoning-gym, the same problems.

    Their ``source`` is the kind, and their metadata the entry's, from which its scorer judges
    (:mod:`exgrpo_cli.verifiers.reasoning_gym`). Two seeds share no problem but by chance, unlike
    reasoning-gym's own, whose neighbours share nearly all.

    Args:
        source: ``reasoning_gym:KIND,KIND``.
        count: problems of each kind, all different; fewer where it has no more, and that is said.
        options: of every kind that has an option of this name, or of one: ``KIND.OPTION``.
        verifier: None: the kind's own scorer.
    """
    if find_spec("reasoning_gym") is None:
        raise InputError(f"{source}: needs reasoning-gym; run: pip install reasoning-gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    kinds = [kind.strip() for kind in source.removeprefix(PREFIX).split(",")]
    for kind in kinds:
        if kind not in DATASETS:
            raise InputError(
                f"{source}: reasoning-gym has no kind {kind!r}"
                f"{_nearest(kind, DATASETS) or '; known are ' + ', '.join(sorted(DATASETS))}"
            )
    names = {
        kind: [f.name for f in dataclasses.fields(DATASETS[kind][1]) if f.name not in _OURS]
        for kind in kinds
    }
    given = _shared_out(names, options)
    tries = _TRIES * count
    made: dict[str, Problem] = {}
    with progress(source, count * len(names), log) as advance:
        for kind in names:
            config = given[kind]
            own_seed = row_seed("reasoning_gym", kind, seed) % 2**31
            try:
                # What some kinds print is no result of the command.
                with contextlib.redirect_stdout(sys.stderr):
                    entries = create_dataset(kind, size=tries, seed=own_seed, **config)
                    full = len(made) + count
                    for number in range(tries):
                        problem = _problem(source, kind, number, entries[number], config)
                        if made.setdefault(problem.prompt[0]["content"], problem) is problem:
                            advance(1)
                        if len(made) == full:
                            break
                    else:
                        log(f"{source}: {kind} has only {len(made) - full + count} questions")
            except Exception as error:  # whatever a kind raises at a value that it refuses
                shown = ", ".join(f"{name}={value}" for name, value in config.items())
                why = first_line(error)
                raise InputError(f"{source}: {kind} refuses {shown or 'this'}: {why}") from error
    return [dataclasses.replace(p, verifier=verifier or p.verifier) for p in made.values()]


def _shared_out(
    names: Mapping[str, Sequence[str]], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Each kind's options out of those that were given."""
    given: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for key, value in options.items():
        kind, dot, option = key.rpartition(".")
        meant = [one for one in names if option in names[one] and kind in ("", one)]
        if not meant:
            asked = [kind] if dot else list(names)
            known = sorted({option for one in asked for option in names.get(one, [])})
            raise InputError(
                f"--set {key}: {' and '.join(asked)} has no such option"
                f"{_nearest(option, known) or '; known are ' + (', '.join(known) or 'none')}"
            )
        for one in meant:
            given[one][option] = value
    return given


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _problem(
    source: str, kind: str, number: int, entry: Mapping[str, Any], config: Mapping[str, Any]
) -> Problem:
    metadata = dict(entry["metadata"]) | ({"config": dict(config)} if config else {})
    answer = entry["answer"]
    return Problem(
        file=source,
        row=number + 1,
        own_id=None,
        prompt=[{"role": "user", "content": clean(str(entry["question"]))}],
        golds=[OPEN_GOLD if answer is None else clean(str(answer))],
        verifier="reasoning_gym",
        source=kind,
        metadata=dump(metadata),
    )
