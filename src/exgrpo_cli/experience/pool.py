"""From the log to the tables ``experience`` and ``questions``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.database import SPILL, connect, copy_query, glob_safe, reading, run_sql
from exgrpo_cli.experience.log import (
    SCORE_COLUMNS,
    StepFiles,
    check_files,
    files_of_step,
    log_digests,
)
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_name

if TYPE_CHECKING:
    import duckdb


def table_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings from which ``experience`` and ``questions`` follow, given the log."""
    curate = recipe.curate
    return {
        "lower": curate.lower,
        "upper": curate.upper,
        "count_replayed": curate.count_replayed,
        "start_success": curate.start_success,
        "store_before_start": curate.store_before_start,
        "revive_after": curate.revive_after,
        "max_age": curate.max_age,
        "max_per_question": curate.max_per_question,
        "max_trajectories": curate.max_trajectories,
        "on_policy": True if _on_policy(recipe) else None,
    }


def _on_policy(recipe: Recipe) -> bool:
    """Whether the recipe never replays: plain GRPO, which stores nothing and retires nothing."""
    return recipe.curate.replay_ratio == 0


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings that a step's curation depends on."""
    chosen = recipe.curate.model_dump(mode="json")
    return chosen | table_settings(recipe) | {
        "samples": recipe.rollout.samples,
        "seed": recipe.seed,
    }  # fmt: skip


@dataclass
class State:
    """How far the tables ``pool`` and ``questions`` of a connection are."""

    last: int = -1
    """The last step taken in; -1 before the first."""
    replay_from: int | None = None
    """The first step with replay; None before a success rate exceeded ``start_success``."""


def read_plan(con: duckdb.DuckDBPyConnection, plan: Path | None) -> None:
    """A step's plan into the working table ``planned``; empty where none is kept."""
    con.execute("DELETE FROM planned").fetchall()
    if plan is not None:
        with reading(("plan", plan, ["problem_id", "role"])):
            con.execute(
                "INSERT INTO planned SELECT problem_id, role FROM read_parquet($files)",
                {"files": glob_safe([plan])},
            ).fetchall()


def read_scored(con: duckdb.DuckDBPyConnection, paths: Sequence[Path], step: int) -> None:
    """Mean entropies from a step's scores into the working table ``scored``."""
    con.execute("DELETE FROM scored").fetchall()
    if paths:
        with reading(*(("scores", path, SCORE_COLUMNS) for path in paths)):
            run_sql(con, "scored", scores=glob_safe(paths), policy=step_name(step))


def _read_step(
    con: duckdb.DuckDBPyConnection, run: RunDir, step: int, step_files: StepFiles, recipe: Recipe
) -> None:
    """A step's rows into ``step_rows``, checked.

    Raises:
        InputError: unreadable files, rows of another step, doubled rows, rows without verdicts.
    """
    import duckdb

    mend = f"run: exgrpo verify {run.root} --step {step}"
    try:
        read_plan(con, step_files.plan)
        read_scored(con, step_files.scores, step)
        run_sql(
            con,
            "step_rows",
            rollouts=glob_safe(step_files.rollouts),
            verdicts=glob_safe(step_files.verdicts),
            root=str(run.root.absolute()).rstrip("/") + "/",
        )
    except duckdb.Error as error:
        check_files(step_files, tables.read_table)  # the clearer message, where it is one of these
        reason = str(error).splitlines()[0]
        raise InputError(f"{run.rollouts(step)}: step {step} cannot be read: {reason}") from error
    found = con.execute(
        "SELECT count(*), count(DISTINCT rollout_id), count(*) FILTER (WHERE correct IS NULL),"
        " min(rollout_id) FILTER (WHERE correct IS NULL),"
        " min(rollout_id) FILTER (WHERE step <> $step),"
        " min(rollout_id) FILTER (WHERE role NOT IN ('fresh', 'replay')) FROM step_rows",
        {"step": step},
    ).fetchall()[0]
    rows, distinct, unjudged, first_unjudged, other_step, other_role = found
    if rows != distinct:
        doubled = con.execute(
            "SELECT rollout_id FROM step_rows GROUP BY rollout_id HAVING count(*) > 1"
            " ORDER BY rollout_id LIMIT 1"
        ).fetchall()[0][0]
        raise InputError(
            f"{run.rollouts(step)}: rollout_id {doubled} is there more than once, among the"
            " rollouts or among their verdicts; remove the doubled part"
        )
    if other_step is not None:
        raise InputError(
            f"{run.rollouts(step)}: rollout {other_step} is of another step than {step};"
            " the files were moved: put them back"
        )
    if unjudged:
        raise InputError(
            f"{run.verdicts(step)}: {unjudged} of {rows} rollouts of step {step} have no verdict"
            f" (the first is {first_unjudged}); {mend}"
        )
    if other_role is not None:
        raise InputError(
            f"{run.rollouts(step)}: rollout {other_role} has a role other than fresh or replay"
        )


def take_in(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    step: int,
    step_files: StepFiles,
    recipe: Recipe,
    state: State,
) -> None:
    """Take a step of the log into ``pool`` and ``questions``; ``state`` moves on.

    Leaves the step's ``step_rows``, ``step_groups`` and ``planned`` in the connection.
    """
    curate = recipe.curate
    _read_step(con, run, step, step_files, recipe)
    replaying = state.replay_from is not None and state.replay_from <= step
    run_sql(
        con,
        "step_groups",
        step=step,
        lower=curate.lower,
        upper=curate.upper,
        count_replayed=curate.count_replayed,
        storing=not _on_policy(recipe) and (replaying or curate.store_before_start),
        retiring=not _on_policy(recipe),
        revive_after=curate.revive_after,
    )
    run_sql(con, "take_in", step=step, count_replayed=curate.count_replayed)
    run_sql(
        con,
        "prune",
        step=step,
        max_age=curate.max_age,
        max_per_question=curate.max_per_question,
        max_trajectories=curate.max_trajectories,
    )
    solved, sampled = con.execute(
        "SELECT coalesce(sum(successes), 0), coalesce(sum(attempts), 0) FROM step_groups"
        " WHERE fresh_attempts > 0"
    ).fetchall()[0]
    starts = sampled and int(solved) / int(sampled) > curate.start_success
    if state.replay_from is None and starts and not _on_policy(recipe):
        state.replay_from = step + 1
    state.last = step


def derive(
    con: duckdb.DuckDBPyConnection, run: RunDir, upto: int, recipe: Recipe, state: State
) -> None:
    """Take in the log's steps after ``state.last`` up to ``upto``, in order."""
    log = RunDir(run.root)
    for step in log.steps("rollouts"):
        if state.last < step <= upto:
            take_in(con, log, step, files_of_step(log, step), recipe, state)


def load_tables(con: duckdb.DuckDBPyConnection, run: RunDir) -> bool:
    """The tables of the run into ``pool`` and ``questions``; False where they are damaged."""
    import duckdb

    try:
        for name, path in (("pool", run.experience), ("questions", run.questions)):
            con.execute(
                f"INSERT INTO {name} BY NAME SELECT * FROM read_parquet($files)",
                {"files": glob_safe([path])},
            ).fetchall()
    except duckdb.Error:
        con.execute("DELETE FROM pool; DELETE FROM questions").fetchall()
        return False
    return True


def write_tables(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    state: State,
    recipe: Recipe,
    digests: Mapping[str, str],
) -> None:
    """Write ``experience``, ``questions`` and then what they were derived from.

    The latter, ``curation.json``, is gone while the tables change, so tables that do not belong
    together are never taken for good ones.
    """
    if run.curation.exists():
        run.curation.unlink()
        tables.fsync(run.root)
    # The pool lies in order of entry, however it was derived; sorting it took half of the time.
    copy_query(con, "SELECT * FROM pool", run.experience)
    copy_query(con, "SELECT * FROM questions ORDER BY problem_id", run.questions)
    tables.write_json(
        run.curation,
        {
            "version": _VERSION,
            "last_step": state.last,
            "replay_from": state.replay_from,
            "settings": all_settings(recipe),
            "log": {s: digest for s, digest in digests.items() if int(s) <= state.last},
        },
    )


# Tables of another version are derived anew: 2 has rewards.
_VERSION = 2


def read_curation(run: RunDir) -> dict[str, Any] | None:
    """What the tables were derived from; None where that is not known or a table is missing."""
    if not (run.curation.exists() and run.experience.exists() and run.questions.exists()):
        return None
    try:
        recorded = json.loads(run.curation.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None
    if not isinstance(recorded, dict) or recorded.get("version") != _VERSION:
        return None
    return recorded


def same_settings(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the tables were derived under these settings; a key unknown then was null."""
    return all(recorded["settings"].get(key) == value for key, value in settings.items())


def same_prefix(recorded: Mapping[str, Any], digests: Mapping[str, str], upto: int) -> bool:
    """Whether the log up to a step is what the tables were derived from."""
    before = {s: d for s, d in recorded["log"].items() if int(s) <= upto}
    return before == {s: d for s, d in digests.items() if int(s) <= upto}


def replay_on(run: RunDir, step: int) -> bool:
    """Whether replay was on in a step that was curated (whether or not it replayed anything).

    Raises:
        InputError: the step was not curated.
    """
    metrics = run.root / "metrics" / step_name(step) / "curate.json"
    if metrics.exists():
        return bool(json.loads(metrics.read_text(encoding="utf-8")).get("replay/started"))
    recorded = read_curation(run)
    if recorded is None or recorded["last_step"] < step:
        raise InputError(
            f"{metrics}: step {step} was not curated yet;"
            f" run: exgrpo curate {run.root} --step {step}"
        )
    return recorded["replay_from"] is not None and recorded["replay_from"] <= step


def rebuild(run: RunDir, upto: int, recipe: Recipe, log: Log | None = None) -> dict[str, Any]:
    """Derive ``experience`` and ``questions`` anew from the log's steps up to ``upto``.

    Plans and curated trajectories stay as they are.

    Returns:
        ``steps`` taken in, ``trajectories`` and ``questions`` in the tables, and ``replay_from``
        (the first step with replay, or None).

    Raises:
        InputError: a step of the log is not whole (missing parts, rollouts without verdicts).
    """
    state = State()
    run = RunDir(run.root)
    # Taken before reading: what changes meanwhile is noticed.
    digests = log_digests(run, upto, upto)
    with connect(run.root / SPILL) as con:
        derive(con, run, upto, recipe, state)
        write_tables(con, run, state, recipe, digests)
        trajectories, questions = con.execute(
            "SELECT (SELECT count(*) FROM pool), (SELECT count(*) FROM questions)"
        ).fetchall()[0]
    steps = [s for s in run.steps("rollouts") if s <= upto]
    if log:
        log(
            f"rebuilt from {len(steps)} steps: {trajectories} trajectories,"
            f" {questions} questions seen"
        )
    return {
        "steps": len(steps),
        "trajectories": trajectories,
        "questions": questions,
        "replay_from": state.replay_from,
    }


def catch_up(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    latest: int,
    recipe: Recipe,
    state: State,
    say: Log,
) -> None:
    """Take in the later steps that the tables held before an earlier step was curated again."""
    try:
        derive(con, run, latest, recipe, state)
    except InputError as error:
        say(f"the experience goes up to step {state.last} only: {error}")
