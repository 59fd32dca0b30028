"""``verify``: a reward for every rollout, and why."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.machine import cores
from exgrpo_cli.problems.values import golds_of
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, VerifySettings
from exgrpo_cli.step import Result, Step
from exgrpo_cli.tables.duck import literal, open_database
from exgrpo_cli.verifiers import (
    STATUSES,
    Verdict,
    allowed_verifier,
    check_verifier,
    is_function,
    takes_metadata,
)
from exgrpo_cli.verifiers.extract import extract_answer
from exgrpo_cli.verifiers.reward import has_required, overlong, well_formed

if TYPE_CHECKING:
    import duckdb
    import polars as pl

    from exgrpo_cli.verifiers.pool import Job, Pool

Gold = tuple[list[str], str, str | None]
Waiting = tuple[str, float, "list[Job]", bool]  # the last: whether they are to be judged

_ROWS_READ = 512
_ROWS_JUDGED = 16_384  # at once; enough that the workers rarely wait for the last one
_BYTES_JUDGED = 64 * 2**20  # of texts held for them
_UNJUDGED = ("unparsable", "timeout", "error")
_READ_WHOLE_TEXTS = ("math", "math_verify")


def verify(
    step: Step,
    recipe: Recipe,
    *,
    shard: tables.Shard = tables.WHOLE,
    force: bool = False,
    log: Log = quiet,
    verifier: str | None = None,
    pool: Pool | None = None,
) -> Result:
    """Judge rollouts: one ``verdicts`` part for each ``rollouts`` part, row for row in its order;
    in a run also the trajectories of others that the step takes in.

    A part whose verdicts exist is skipped, so a killed run goes on where it stopped. Memory stays
    bounded however large a part and its row groups are; the workers and what they have judged are
    kept from part to part.

    A response without the format that ``verify.require`` names is not judged: its status is
    ``no_format``, it is not correct, and it earns 0. Otherwise the reward is the verifier's, plus
    ``verify.format_reward`` where the response is in ``verify.format``. ``verify.length_penalty``
    is taken from either where the response is overlong (see :mod:`exgrpo_cli.verifiers.reward`).

    Args:
        step: reads ``rollouts`` and ``problems``, writes ``verdicts``: a folder of parts or, for
            one rollouts file, a ``.parquet`` file.
        recipe: its ``verify`` section; ``rollout.max_new_tokens`` for the length penalty.
        shard: judge only the parts of this shard.
        force: judge again what is there already.
        log: takes one-line messages.
        verifier: judges all rollouts, whatever the problems say; None: each problem's own.
        pool: workers to use, see :func:`open_pool`; by default they are started here, and ended.

    Returns:
        Parts done and skipped; metrics ``rows`` judged now, ``correct``, ``by_status`` (count by
        status) and ``seconds``. What was computed is the time of the workers, shared among them.

    Raises:
        InputError: a table that does not fit its schema, a rollout of a problem that is not in
            ``problems``, an unknown verifier, a user's function that cannot be loaded.
        StageError: worker processes cannot be started.
    """
    began = time.monotonic()
    targets = _targets(step.rollouts, step.verdicts)
    imports = enumerate(step.imports("verdicts"))
    golds = _read_golds(step.problems, recipe, verifier)
    mine = [(file, target) for file, target in targets if shard.has(tables.part_number(file)[0])]
    mine += [pair for number, pair in imports if shard.has(number)]
    todo = [(file, target) for file, target in mine if force or not target.exists()]
    total = _Counts()
    with (
        contextlib.nullcontext(pool) if pool is not None else open_pool(recipe) as judges,
        # It reads pages as they are asked for; other readers take whole row groups, which may be
        # gigabytes of text.
        open_database(
            threads=1, disable_parquet_prefetching=True, enable_external_file_cache=False
        ) as con,
    ):
        judges.forget_timeouts()
        for file, target in todo:
            part = _Counts()
            judged = _judge_part(con, file, golds, step.problems, recipe, judges, part)
            tables.write_frames("verdicts", judged, target)
            total.add(part)
            others = [f"{n} {s}" for s, n in part.by_status.items() if n and s != "ok"]
            words = f" ({', '.join(others)})" if others else ""
            log(f"{target}: {part.correct} of {part.rows} correct{words}")
    unjudged = [f"{n} {s}" for s, n in total.by_status.items() if n and s in _UNJUDGED]
    return Result(
        len(todo),
        len(mine) - len(todo),
        metrics={
            "rows": total.rows,
            "correct": total.correct,
            "by_status": total.by_status,
            "seconds": time.monotonic() - began,
        },
        notes=(f"of {total.rows} verdicts {', '.join(unjudged)}",) if unjudged else (),
        compute_seconds=total.seconds / (recipe.verify.workers or len(cores())),
    )


def open_pool(recipe: Recipe) -> Pool:
    """Workers as the recipe's ``verify`` section has them; they start when there is work."""
    from exgrpo_cli.verifiers.pool import Pool

    settings = recipe.verify
    return Pool(settings.workers, settings.timeout, settings.memory_mb)


def refuse_errors(judged: Result, verdicts: Path) -> None:
    """Stop where nothing could be judged: it would pass for a policy that solves nothing."""
    rows, counts = judged.metrics["rows"], judged.metrics["by_status"]
    if rows and counts["error"] + counts["timeout"] == rows:
        what = "a timeout" if counts["timeout"] else "an error"
        raise StageError(
            f"{verdicts}: every verdict is {what}; verify with --explain ROLLOUT_ID says why, and"
            " with --force judges again"
        )


def explain(
    step: Step, recipe: Recipe, rollout_id: str, verifier: str | None = None
) -> dict[str, Any]:
    """Judge one rollout afresh and say how its answers were understood.

    Returns:
        ``rollout_id``, ``problem_id``, ``verifier``, ``answer`` (the gold), ``extracted``,
        ``parsed_answer``, ``parsed_extracted`` (as the verifier reads them; None where it does
        not), ``status``, ``correct``, ``reward``, ``seconds``, ``why``, and ``response_end``: the
        last 300 characters of the response.
    """
    from exgrpo_cli.verifiers.pool import Pool

    problems = step.problems
    golds = _read_golds(problems, recipe, verifier)
    imported = [file for file, _ in step.imports("verdicts")]
    for file in [*tables.parquet_files(step.rollouts), *imported]:
        identifiers = tables.read_table("rollouts", file, ["rollout_id"])["rollout_id"]
        index = identifiers.index_of(rollout_id)
        if index is None:
            continue
        row = _read_row(file, index, _columns(recipe))
        settings = recipe.verify
        jobs = _jobs(row, golds, problems, file, settings)
        if has_required(row["text"], settings.require):
            with Pool(1, settings.timeout, settings.memory_mb) as pool:
                job, verdict = _best([(job, pool.explain(job)) for job in jobs])
        else:
            why = f"the response is not in the format of verify.require, {settings.require}"
            job, verdict = jobs[0], Verdict("no_format", why=why)
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
            "reward": verdict.reward + _extra_reward(row, recipe),
            "seconds": verdict.seconds,
            "why": verdict.why,
            "response_end": row["text"][-300:],
        }
    raise InputError(f"{step.rollouts}: no rollout {rollout_id!r} here")


def _targets(rollouts: Path, out: Path) -> list[tuple[Path, Path]]:
    """Each rollouts file with the file for its verdicts."""
    files = tables.parquet_files(rollouts)
    if out.suffix == ".parquet" and not out.is_dir():
        if len(files) != 1:
            raise InputError(
                f"{out}: one file cannot hold the verdicts of {len(files)} rollout parts;"
                " give a folder"
            )
        targets = [(files[0], out)]
    else:
        targets = [(file, out / file.name) for file in files]
    for file, target in targets:
        if target.exists() and target.samefile(file):
            raise InputError(f"{out}: the verdicts would lie upon the rollouts; give another --out")
    return targets


def _read_golds(problems: Path, recipe: Recipe, verifier: str | None = None) -> dict[str, Gold]:
    """``problem_id`` to gold answers, verifier and (for functions) metadata."""
    data = tables.read_table("problems", problems, ["problem_id", "answer", "verifier", "metadata"])
    for name in [verifier] if verifier else data["verifier"].unique(maintain_order=True):
        if not verifier:
            row = ((data["verifier"] == name).arg_max() or 0) + 1
            allowed_verifier(name, [recipe.problems.verifier], f"{problems}, row {row}")
        check_verifier(name)
    return {i: (golds_of(a, m), verifier or v, m) for i, a, v, m in data.iter_rows()}


def _columns(recipe: Recipe) -> list[str]:
    """The columns of the rollouts that verdicts depend on."""
    length = ["tokens", "finish_reason"] if recipe.verify.length_penalty else []
    return ["rollout_id", "problem_id", "text", *length]


def _read_rows(
    con: duckdb.DuckDBPyConnection, file: Path, columns: list[str]
) -> Iterator[dict[str, Any]]:
    """A file's rows in their order, a few in memory at a time."""
    import duckdb

    tables.check_columns("rollouts", file, columns)
    tables.read_table("rollouts", file, [name for name in columns if name != "text"])
    number = 0
    try:
        con.execute(
            f"SELECT {', '.join(columns)} FROM read_parquet($file)", {"file": literal([file])}
        )
        while rows := con.fetchmany(_ROWS_READ):
            for row in rows:
                number += 1
                if None in row:
                    column = columns[row.index(None)]
                    raise InputError(
                        f"{file}: column {column} is null in row {number}; rollouts needs a value"
                    )
                yield dict(zip(columns, row, strict=True))
    except duckdb.Error as error:
        why = first_line(error)
        raise InputError(
            f"{file}: not a readable Parquet file (truncated or damaged?): {why}"
        ) from error


def _read_row(file: Path, index: int, columns: list[str]) -> dict[str, Any]:
    import polars as pl

    rows = pl.scan_parquet(file, glob=False).slice(index, 1).select(columns)
    return rows.collect().row(0, named=True)


def _jobs(
    row: dict[str, Any],
    golds: dict[str, Gold],
    problems: Path,
    file: Path,
    settings: VerifySettings,
) -> list[Job]:
    """What decides a rollout's verdict: a job for each gold answer, of which any is right."""
    from exgrpo_cli.verifiers.pool import Job

    gold = golds.get(row["problem_id"])
    if gold is None:
        raise InputError(
            f"{file}: rollout {row['rollout_id']} answers problem_id {row['problem_id']!r}, which"
            f" is not in {problems}; give the problems that were rolled out"
        )
    answers, verifier, metadata = gold
    extracted = None
    if has_required(row["text"], settings.require):
        extracted = extract_answer(row["text"], settings.extract)
    if not takes_metadata(verifier):
        whole = settings.extract == "whole" and verifier in _READ_WHOLE_TEXTS
        return [Job(verifier, answer, extracted, whole=whole) for answer in answers]
    try:
        values = json.loads(metadata) if metadata else {}
    except ValueError:  # no JSON, or an integer too long to be read
        values = None
    if not isinstance(values, dict):
        raise InputError(
            f"{problems}: metadata of problem_id {row['problem_id']!r} is no JSON object, which"
            f" verifier {verifier} takes"
        )
    response = row["text"] if is_function(verifier) else ""
    return [Job(verifier, answers[0], extracted, response=response, metadata=values)]


def _best(judged: Sequence[tuple[Job, Verdict]]) -> tuple[Job, Verdict]:
    """The verdict that counts where there are several golds: the first right one, else the first
    that was judged, else the first; with the time of all."""
    job, verdict = max(judged, key=lambda pair: (pair[1].correct, pair[1].status == "ok"))
    return job, replace(verdict, seconds=sum(one.seconds for _, one in judged))


def _extra_reward(row: dict[str, Any], recipe: Recipe) -> float:
    """What format and length add to a response's reward."""
    settings = recipe.verify
    extra = 0.0
    rewarded = settings.format_reward and has_required(row["text"], settings.require)
    if rewarded and well_formed(row["text"], settings.format):
        extra += settings.format_reward
    if settings.length_penalty:
        truncated = row["finish_reason"] == "length"
        limit = recipe.rollout.max_new_tokens
        share = overlong(row["tokens"], truncated, limit, settings.length_margin)
        extra -= settings.length_penalty * share
    return extra


@dataclass
class _Counts:
    """What a part held."""

    rows: int = 0
    correct: int = 0
    seconds: float = 0.0
    """In the workers."""
    by_status: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))

    def add(self, other: _Counts) -> None:
        self.rows += other.rows
        self.correct += other.correct
        self.seconds += other.seconds
        for status, count in other.by_status.items():
            self.by_status[status] += count


def _judge_part(
    con: duckdb.DuckDBPyConnection,
    file: Path,
    golds: dict[str, Gold],
    problems: Path,
    recipe: Recipe,
    pool: Pool,
    counts: _Counts,
) -> Iterator[pl.DataFrame]:
    """The verdicts on a file's rows, in their order, some thousands at a time."""
    waiting: list[Waiting] = []
    held = 0
    for row in _read_rows(con, file, _columns(recipe)):
        jobs = _jobs(row, golds, problems, file, recipe.verify)
        judged = has_required(row["text"], recipe.verify.require)
        waiting.append((row["rollout_id"], _extra_reward(row, recipe), jobs, judged))
        held += len(jobs[0].response) + len(jobs[0].extracted or "")
        if len(waiting) >= _ROWS_JUDGED or held >= _BYTES_JUDGED:
            yield _judge(waiting, pool, counts)
            waiting, held = [], 0
    yield _judge(waiting, pool, counts)


def _judge(waiting: Sequence[Waiting], pool: Pool, counts: _Counts) -> pl.DataFrame:
    rows = []
    verdicts = iter(pool.judge([job for _, _, jobs, judged in waiting if judged for job in jobs]))
    for rollout_id, extra, jobs, judged in waiting:
        if judged:
            job, verdict = _best([(job, next(verdicts)) for job in jobs])
        else:
            job, verdict = jobs[0], Verdict("no_format")
        counts.rows += 1
        counts.correct += verdict.correct
        counts.by_status[verdict.status] += 1
        counts.seconds += verdict.seconds
        rows.append(
            {
                "rollout_id": rollout_id,
                "reward": verdict.reward + extra,
                "correct": verdict.correct,
                "extracted": job.extracted,
                "status": verdict.status,
                "verifier": job.verifier,
                "seconds": verdict.seconds,
            }
        )
    return tables.frame("verdicts", rows)
