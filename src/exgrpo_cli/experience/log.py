"""The log of a run, which is the truth: the files of its steps, and whether they changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.rundir import RunDir

# What curation reads of a log's files; never their token lists.
_ROLLOUT_COLUMNS = (
    "rollout_id", "step", "problem_id", "sample", "role", "policy", "mean_entropy",
    "entropy_source", "mean_logprob", "tokens", "token_hash", "finish_reason",
)  # fmt: skip


_VERDICT_COLUMNS = ("rollout_id", "reward", "correct", "status")


SCORE_COLUMNS = ("rollout_id", "policy", "mean_entropy", "mean_logprob")


@dataclass(frozen=True)
class StepFiles:
    """The files of one step of the log."""

    rollouts: list[Path]
    verdicts: list[Path]
    scores: list[Path]
    replay_scores: list[Path]
    plan: Path | None


def _score_parts(run: RunDir, step: int, prefix: str) -> list[Path]:
    """A step's score parts of one prefix: all of them, or none.

    Raises:
        InputError: some are missing, or parts of two divisions lie together.
    """
    folder = run.scores(step)
    if folder.is_file():  # an explicit path to a loose file of the step's own scores
        return [folder] if prefix == "part" else []
    found = sorted(folder.glob(f"{prefix}-*.parquet")) if folder.is_dir() else []
    counts = sorted({tables.part_number(file)[1] for file in found})
    if len(counts) > 1:
        raise InputError(
            f"{folder}: {prefix} parts of {counts[0]} and of {counts[-1]} lie together;"
            " remove the stale ones"
        )
    have = {tables.part_number(file)[0] for file in found}
    missing = sorted(set(range(counts[0])) - have) if counts else []
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {counts[0]} parts are missing (the first is"
            f" {tables.part_name(missing[0], counts[0], prefix)});"
            f" run: exgrpo score {run.root} --step {step}"
        )
    return found


def files_of_step(run: RunDir, step: int) -> StepFiles:
    """A step's files, refused when some are missing.

    Raises:
        InputError: no rollouts or verdicts, or missing parts, with the command that makes them.
    """
    rollouts = tables.require_all_parts(
        run.rollouts(step),
        f"rollouts of step {step}",
        f"run: exgrpo rollout {run.root} --step {step}",
    )
    verdicts = tables.require_all_parts(
        run.verdicts(step),
        f"verdicts of step {step}",
        f"run: exgrpo verify {run.root} --step {step}",
    )
    plan = run.plan(step)
    return StepFiles(
        rollouts=rollouts,
        verdicts=verdicts,
        scores=_score_parts(run, step, "part"),
        replay_scores=_score_parts(run, step, "replay"),
        plan=plan if plan.exists() else None,
    )


def check_files(step_files: StepFiles, check: Callable[..., object]) -> None:
    """Check a step's files: ``tables.check_columns`` their footers, ``tables.read_table`` all."""
    for table, paths, columns in (
        ("rollouts", step_files.rollouts, _ROLLOUT_COLUMNS),
        ("verdicts", step_files.verdicts, _VERDICT_COLUMNS),
        ("scores", [*step_files.scores, *step_files.replay_scores], SCORE_COLUMNS),
        ("plan", [step_files.plan] if step_files.plan else [], ("problem_id", "role")),
    ):
        for path in paths:
            check(table, path, columns)


def _digest(run: RunDir, step: int) -> str:
    """A digest of a step's log: the names, sizes and times of writing of the files it holds.

    A part is written once and renamed into place, so a part that was made again has another time.
    The scores of replay candidates are left out: the tables do not depend on them.
    """
    lines = []
    for path, prefix in (
        (run.plan(step), ""),
        (run.rollouts(step), ""),
        (run.verdicts(step), ""),
        (run.scores(step), "part-"),
    ):
        name = str(path.relative_to(run.root) if path.is_relative_to(run.root) else path)
        if path.is_file():  # a plan; an explicit path may be a single file too
            status = path.stat()
            lines.append(f"{name} {status.st_size} {status.st_mtime_ns}")
        elif path.is_dir():
            with os.scandir(path) as entries:  # a run has tens of thousands of parts
                parts = sorted(
                    (entry.name, entry.stat())
                    for entry in entries
                    if entry.name.startswith(prefix)
                    and entry.name.endswith(".parquet")
                    and not entry.name.startswith(".")
                    and entry.is_file()
                )
            lines += [f"{name}/{part} {s.st_size} {s.st_mtime_ns}" for part, s in parts]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def log_digests(run: RunDir, step: int, upto: int) -> dict[str, str]:
    """The digest of each step of the log up to ``upto``, that one included."""
    log = RunDir(run.root)
    digests = {str(s): _digest(log, s) for s in log.steps("rollouts") if s <= upto}
    return digests
