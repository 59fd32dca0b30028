"""The history of a run, which is the truth: the files of its steps, read, and whether they changed.

Token lists are never read here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.experience.database import fill, reading, run_sql
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal
from exgrpo_cli.tables.values import faulty

if TYPE_CHECKING:
    import duckdb

_COLUMNS = {
    "rollouts": (
        "rollout_id", "step", "problem_id", "sample", "role", "policy", "mean_entropy",
        "entropy_source", "mean_logprob", "tokens", "token_hash", "finish_reason",
    ),
    "verdicts": ("rollout_id", "reward", "correct", "status"),
    "scores": ("rollout_id", "policy", "step", "mean_entropy", "mean_logprob"),
    "plan": ("step", "problem_id", "role"),
}  # fmt: skip
_IN_STEP_ROWS = {
    "rollouts": (
        "rollout_id", "step", "problem_id", "sample", "role", "mean_entropy", "entropy_source",
        "mean_logprob", "tokens", "token_hash", "finish_reason",
    ),
    "verdicts": ("reward", "correct", "status"),
}  # fmt: skip


@dataclass(frozen=True)
class StepFiles:
    """The files of one step of a run's history, whole."""

    run: RunDir
    step: int
    rollouts: list[Path]
    verdicts: list[Path]
    scores: list[Path]
    """Of the step's own rollouts."""
    replay_scores: list[Path]
    """Of the stored trajectories that the step could replay."""
    plan: Path | None
    imports: StepFiles | None = None
    """Trajectories of others that the step takes in."""

    @classmethod
    def of(cls, run: RunDir, step: int) -> StepFiles:
        """A step's files."""
        where = f"{run.root} --step {step}"
        plan = run.plan(step)
        return cls(
            run,
            step,
            tables.require_all_parts(
                run.rollouts(step), f"rollouts of step {step}", f"run: exgrpo rollout {where}"
            ),
            tables.require_all_parts(
                run.verdicts(step), f"verdicts of step {step}", f"run: exgrpo verify {where}"
            ),
            _score_parts(run, step, "part"),
            _score_parts(run, step, "replay"),
            plan if plan.exists() else None,
            _imports(run, step),
        )

    def check(self, check: Callable[..., object] = tables.check_columns) -> None:
        """Check the files: ``tables.check_columns`` their footers, :meth:`read` all."""
        scores = [*self.scores, *self.replay_scores]
        plans = [self.plan] if self.plan else []
        for table, paths in (
            ("rollouts", self.rollouts),
            ("verdicts", self.verdicts),
            ("scores", scores),
            ("plan", plans),
        ):
            for path in paths:
                check(table, path, _COLUMNS[table])

    def read(self) -> None:
        """Check every value that curation reads."""
        self.check(partial(tables.read_table, step=self.step))


def _imports(run: RunDir, step: int) -> StepFiles | None:
    """The files of what a step takes in from others; None where there is nothing."""
    rollouts = run.imports(step)
    if not rollouts:
        return None
    others: dict[str, list[Path]] = {}
    for kind, stage in (("verdicts", "verify"), ("scores", "score")):
        folder = run.imported(kind, step)
        found = [folder / file.name for file in rollouts if (folder / file.name).exists()]
        if len(found) < len(rollouts) and (found or kind == "verdicts"):
            raise InputError(
                f"{folder}: {len(found)} of {len(rollouts)} files of imported trajectories have"
                f" {kind}; run: exgrpo {stage} {run.root} --step {step}"
            )
        others[kind] = found
    return StepFiles(run, step, rollouts, others["verdicts"], others["scores"], [], None)


def _score_parts(run: RunDir, step: int, prefix: str) -> list[Path]:
    """A step's score parts of one prefix: all of them, or none."""
    folder = run.scores(step)
    found = sorted(folder.glob(f"{prefix}-*.parquet"))
    if found:
        mend = f"run: exgrpo score {run.root} --step {step}"
        tables.require_one_division(folder, found, mend, prefix)
    return found


def read_plan(con: duckdb.DuckDBPyConnection, plan: Path | None, step: int) -> None:
    """A step's plan into the working table ``planned``; empty where none is kept."""
    fill(con, "planned")
    if plan is not None:
        rows = tables.read_table("plan", plan, _COLUMNS["plan"], step=step)
        fill(con, "planned", rows.select("problem_id", "role").rows())


def read_unsampled(con: duckdb.DuckDBPyConnection, files: StepFiles) -> None:
    """A step's planned replay questions without rollouts (their prompts have become too long)
    into the working table ``unsampled``."""
    if files.plan is not None:
        with reading(*(("rollouts", path, ["problem_id", "role"]) for path in files.rollouts)):
            run_sql(con, "unsampled", plan=literal([files.plan]), rollouts=literal(files.rollouts))


def read_scored(
    con: duckdb.DuckDBPyConnection, files: StepFiles | None, *, replay: bool = False
) -> None:
    """Mean entropies from a step's scores into the working table ``scored``.

    Args:
        files: of the step; None where nothing of it was sampled yet.
        replay: those of the stored trajectories instead of the step's own rollouts.
    """
    fill(con, "scored")
    scores = [] if files is None else files.replay_scores if replay else files.scores
    if files is None or not scores:
        return
    with reading(
        *(("scores", path, _COLUMNS["scores"]) for path in scores),
        *(("rollouts", path, ["policy"]) for path in files.rollouts),
    ):
        run_sql(con, "scored", scores=literal(scores), rollouts=literal(files.rollouts))
        wrong = con.execute(
            f"SELECT count(*) FROM read_parquet($scores) WHERE step <> {files.step} OR"
            f" {faulty('scores', _COLUMNS['scores'])}",
            {"scores": literal(scores)},
        ).fetchall()[0][0]
    if wrong:
        tables.read_table("scores", scores, _COLUMNS["scores"], step=files.step)


def read_step(con: duckdb.DuckDBPyConnection, files: StepFiles) -> None:
    """A step into ``planned``, ``scored`` and ``step_rows``, checked."""
    import duckdb

    run, step = files.run, files.step
    files.check()  # DuckDB would cast one type to another without a word
    try:
        read_plan(con, files.plan, step)
        read_scored(con, files)
        run_sql(
            con,
            "step_rows",
            rollouts=literal(files.rollouts),
            verdicts=literal(files.verdicts),
            root=str(run.root.absolute()).rstrip("/") + "/",
        )
    except duckdb.Error as error:
        files.read()  # the clearer message, where it is one of these
        reason = first_line(error)
        folder = files.rollouts[0].parent
        raise InputError(f"{folder}: step {step} cannot be read: {reason}") from error
    (found,) = run_sql(con, "step_faults", step=step, verdicts=literal(files.verdicts))
    rules = " OR ".join(faulty(table, columns) for table, columns in _IN_STEP_ROWS.items())
    wrong = con.execute(f"SELECT count(*) FROM step_rows WHERE {rules}").fetchall()[0][0]
    between = any(found[name] is not None for name in ("doubled", "unscored", "other_step"))
    if not (wrong or between or found["verdicts"] != found["rows"]):
        return
    files.read()
    _refuse(files, found)


def _refuse(files: StepFiles, found: Mapping[str, Any]) -> None:
    """What is wrong between a step's files, each of which is sound by itself: ``found`` is the row
    of ``step_faults``."""
    run, step, verdicts = files.run, files.step, files.verdicts[0].parent
    if found["doubled"] is not None:
        raise InputError(
            f"{files.rollouts[0].parent}: rollout_id {found['doubled']} is there more than once,"
            " among the rollouts or among their verdicts; remove the doubled part"
        )
    if found["unjudged"]:
        raise InputError(
            f"{verdicts}: {found['unjudged']} of {found['rows']} rollouts of step {step}"
            f" have no verdict (the first is {found['first_unjudged']});"
            f" run: exgrpo verify {run.root} --step {step} --force"
        )
    if found["unscored"] is not None:
        raise InputError(
            f"{files.scores[0].parent}: a score of {found['unscored']}, which is not among the"
            f" rollouts of step {step}; run: exgrpo score {run.root} --step {step} --force"
        )
    raise InputError(
        f"{verdicts}: {found['verdicts']} verdicts on {found['rows']} rollouts;"
        f" run: exgrpo verify {run.root} --step {step} --force"
    )


def history_digests(run: RunDir, upto: int) -> dict[str, str]:
    """A digest of each step of a run's history, up to ``upto`` and that one included."""
    return {str(step): _digest(run, step) for step in run.steps("rollouts") if step <= upto}


def _digest(run: RunDir, step: int) -> str:
    """A digest of the names, sizes and times of writing of a step's files.

    A part is written once and renamed into place, so a part that was made again has another time.
    The scores of replay candidates are left out: the tables do not depend on them.
    """
    plan = run.plan(step)
    found = [(plan, plan.stat())] if plan.is_file() else []
    folders = [(run.rollouts(step), ""), (run.verdicts(step), ""), (run.scores(step), "part-")]
    if run.imported("rollouts", step).is_dir():
        folders += [(run.imported(kind, step), "") for kind in ("rollouts", "verdicts", "scores")]
    for folder, prefix in folders:
        if folder.is_dir():
            with os.scandir(folder) as entries:  # a run has tens of thousands of parts
                parts = sorted(
                    (entry.name, entry.stat())
                    for entry in entries
                    if entry.name.startswith(prefix)
                    and entry.name.endswith(".parquet")
                    and not entry.name.startswith(".")
                    and entry.is_file()
                )
            found += [(folder / name, status) for name, status in parts]
    lines = [
        f"{path.relative_to(run.root)} {status.st_size} {status.st_mtime_ns}"
        for path, status in found
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
