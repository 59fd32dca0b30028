"""``verify``: a reward for every rollout, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.verifiers import STATUSES, check_verifier, is_function
from exgrpo_cli.verifiers.extract import extract_answer

if TYPE_CHECKING:
    import polars as pl

    from exgrpo_cli.verifiers.pool import Job, Pool


def verify(
    rollouts: Path | Sequence[Path],
    problems: Path,
    out: Path,
    recipe: Recipe,
    *,
    shard: tables.Shard = tables.WHOLE,
    force: bool = False,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Judge rollouts: one ``verdicts`` part for each ``rollouts`` part, row for row in its order.

    A part whose verdicts exist is skipped, so a killed run goes on where it stopped. One part is in
    memory at a time; the workers and what they have judged are kept from part to part.

    Args:
        rollouts: a folder of parts, a file, or several of either.
        problems: the ``problems`` table.
        out: the folder for the verdicts; or, for one rollouts file, a ``.parquet`` file.
        recipe: its ``verify`` section: ``timeout``, ``workers``, ``memory_mb``.
        shard: judge only the parts of this shard.
        force: judge again what is there already.
        log: takes one-line messages.

    Returns:
        ``rows`` judged now, ``correct``, ``by_status`` (count by status), ``parts_done``,
        ``parts_skipped``, ``seconds``.

    Raises:
        InputError: a table that does not fit its schema, a rollout of a problem that is not in
            ``problems``, an unknown verifier, a user's function that cannot be loaded.
        StageError: worker processes cannot be started.
    """
    from exgrpo_cli.verifiers.pool import Pool

    say = log or (lambda _: None)
    began = time.monotonic()
    targets = _targets(rollouts, out)
    golds = _read_golds(problems)
    mine = [(file, target) for file, target in targets if shard.has(tables.part_number(file)[0])]
    todo = [(file, target) for file, target in mine if force or not target.exists()]
    total = {"rows": 0, "correct": 0}
    by_status = dict.fromkeys(STATUSES, 0)
    settings = recipe.verify
    with Pool(settings.workers, settings.timeout, settings.memory_mb) as pool:
        for file, target in todo:
            verdicts = _judge_part(file, golds, problems, pool)
            tables.write_table("verdicts", verdicts, target)
            correct = int(verdicts["correct"].sum())
            total["rows"] += verdicts.height
            total["correct"] += correct
            for status in verdicts["status"]:
                by_status[status] += 1
            others = [
                f"{count} {status}"
                for status, count in verdicts["status"].value_counts(sort=True).iter_rows()
                if status != "ok"
            ]
            words = f" ({', '.join(others)})" if others else ""
            say(f"{target}: {correct} of {verdicts.height} correct{words}")
    return total | {
        "by_status": by_status,
        "parts_done": len(todo),
        "parts_skipped": len(mine) - len(todo),
        "seconds": time.monotonic() - began,
    }


def explain(
    rollouts: Path | Sequence[Path], problems: Path, rollout_id: str, recipe: Recipe
) -> dict[str, Any]:
    """Judge one rollout afresh and say how its answers were understood.

    Args:
        rollouts: a folder of parts, a file, or several of either.
        problems: the ``problems`` table.
        rollout_id: which.
        recipe: its ``verify`` section.

    Returns:
        ``rollout_id``, ``problem_id``, ``verifier``, ``answer`` (the gold), ``extracted``,
        ``parsed_answer``, ``parsed_extracted`` (as the verifier reads them; None where it does
        not), ``status``, ``correct``, ``reward``, ``seconds``, ``why``, and ``response_end``: the
        last 300 characters of the response.

    Raises:
        InputError: no such rollout; otherwise as :func:`verify`.
    """
    from exgrpo_cli.verifiers.pool import Pool

    roots = [rollouts] if isinstance(rollouts, Path) else list(rollouts)
    golds = _read_golds(problems)
    for file in (file for root in roots for file in tables.parquet_files(root)):
        identifiers = tables.read_table("rollouts", file, ["rollout_id"])["rollout_id"]
        index = (identifiers == rollout_id).arg_max() if identifiers.len() else None
        if index is None or identifiers[index] != rollout_id:
            continue
        row = _read_rollouts(file).row(index, named=True)
        job = _job(row, golds, problems, file)
        settings = recipe.verify
        with Pool(1, settings.timeout, settings.memory_mb) as pool:
            verdict = pool.explain(job)
        return {
            "rollout_id": rollout_id,
            "problem_id": row["problem_id"],
            "verifier": job.verifier,
            "answer": job.answer,
            "extracted": job.extracted,
            "parsed_answer": verdict.parsed_answer,
            "parsed_extracted": verdict.parsed_extracted,
            "status": verdict.status,
            "correct": verdict.correct,
            "reward": verdict.reward,
            "seconds": verdict.seconds,
            "why": verdict.why,
            "response_end": row["text"][-300:],
        }
    where = ", ".join(str(root) for root in roots)
    raise InputError(f"{where}: no rollout {rollout_id!r} here")


def _targets(rollouts: Path | Sequence[Path], out: Path) -> list[tuple[Path, Path]]:
    """Each rollouts file with the file for its verdicts."""
    roots = [rollouts] if isinstance(rollouts, Path) else list(rollouts)
    files = [file for root in roots for file in tables.parquet_files(root)]
    if out.suffix == ".parquet" and not out.is_dir():
        if len(files) != 1:
            raise InputError(
                f"{out}: one file cannot hold the verdicts of {len(files)} rollout parts;"
                " give a folder"
            )
        targets = [(files[0], out)]
    else:
        targets = [(file, out / file.name) for file in files]
    names: dict[Path, Path] = {}
    for file, target in targets:
        if target.exists() and target.samefile(file):
            raise InputError(f"{out}: the verdicts would lie upon the rollouts; give another --out")
        if target in names:
            raise InputError(f"{names[target]} and {file} have the same name; verify them apart")
        names[target] = file
    return targets


def _read_golds(problems: Path) -> dict[str, tuple[str, str, str | None]]:
    """``problem_id`` to answer, verifier and (for functions) metadata."""
    data = tables.read_table("problems", problems, ["problem_id", "answer", "verifier", "metadata"])
    if data["problem_id"].is_duplicated().any():
        row = data["problem_id"].is_duplicated().arg_max() or 0
        raise InputError(
            f"{problems}: problem_id {data['problem_id'][row]!r} is there more than once"
        )
    for verifier in data["verifier"].unique(maintain_order=True):
        check_verifier(verifier)
    return {identifier: (a, v, m) for identifier, a, v, m in data.iter_rows()}


def _read_rollouts(file: Path) -> pl.DataFrame:
    return tables.read_table("rollouts", file, ["rollout_id", "problem_id", "text"])


def _job(
    row: dict[str, Any],
    golds: dict[str, tuple[str, str, str | None]],
    problems: Path,
    file: Path,
) -> Job:
    from exgrpo_cli.verifiers.pool import Job

    gold = golds.get(row["problem_id"])
    if gold is None:
        raise InputError(
            f"{file}: rollout {row['rollout_id']} answers problem_id {row['problem_id']!r}, which"
            f" is not in {problems}; give the problems that were rolled out"
        )
    answer, verifier, metadata = gold
    extracted = extract_answer(row["text"])
    if not is_function(verifier):
        return Job(verifier, answer, extracted)
    try:
        values = json.loads(metadata) if metadata else {}
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise InputError(
            f"{problems}: metadata of problem_id {row['problem_id']!r} is no JSON object, which"
            f" verifier {verifier} takes"
        )
    return Job(verifier, answer, extracted, response=row["text"], metadata=values)


def _judge_part(
    file: Path, golds: dict[str, tuple[str, str, str | None]], problems: Path, pool: Pool
) -> pl.DataFrame:
    rows = _read_rollouts(file)
    jobs = [_job(row, golds, problems, file) for row in rows.iter_rows(named=True)]
    verdicts = pool.judge(jobs)
    return tables.frame(
        "verdicts",
        (
            {
                "rollout_id": rollout_id,
                "reward": verdict.reward,
                "correct": verdict.correct,
                "extracted": job.extracted,
                "status": verdict.status,
                "verifier": job.verifier,
                "seconds": verdict.seconds,
            }
            for rollout_id, job, verdict in zip(rows["rollout_id"], jobs, verdicts, strict=True)
        ),
    )
