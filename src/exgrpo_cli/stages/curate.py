"""Curation: which experience is kept, and what each step learns from.

The log of a run (rollouts, verdicts, scores) is the truth. From it follow two tables,
``experience`` (the pool: an index of the stored successes) and ``questions`` (each question's
bucket, retirement and epoch), and from these what a step replays and what the next step samples.
The rules are the queries in ``exgrpo_cli/sql``, one file a step; this module runs them in order,
does the one random draw that is not a hash (how many questions come from each bucket), and keeps
the tables in step with the log.

The method is ExGRPO's (arXiv 2510.02245), section "Experience Management".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import CurateSettings, Recipe
from exgrpo_cli.rundir import RunDir, step_name

if TYPE_CHECKING:
    import duckdb
    import polars as pl


MEMORY_LIMIT = "1GB"
"""DuckDB's; beyond it, it spills to a hidden folder in the run directory."""

_SPILL = ".curate-spill"

# What curation reads of a log's files; never their token lists.
_ROLLOUT_COLUMNS = (
    "rollout_id", "step", "problem_id", "sample", "role", "policy", "mean_entropy",
    "entropy_source", "mean_logprob", "tokens", "token_hash", "finish_reason",
)  # fmt: skip
_VERDICT_COLUMNS = ("rollout_id", "reward", "correct", "status")
_SCORE_COLUMNS = ("rollout_id", "policy", "mean_entropy", "mean_logprob")


# --- running the queries ------------------------------------------------------------------------


def sql_text(name: str) -> str:
    """The text of a query: ``choose`` is ``exgrpo_cli/sql/choose.sql``."""
    return files("exgrpo_cli").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def run_sql(con: duckdb.DuckDBPyConnection, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run the statements of a query file in order; each is given the parameters that it names.

    Returns:
        The rows of the last statement.
    """
    rows: list[tuple[Any, ...]] = []
    for statement in con.extract_statements(sql_text(name)):
        wanted = {key: parameters[key] for key in statement.named_parameters}
        rows = con.execute(statement, wanted).fetchall()
    return rows


@contextmanager
def _connect(spill: Path | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory database with the working tables, all empty."""
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {"memory_limit": MEMORY_LIMIT}
    if spill is not None:
        settings["temp_directory"] = str(spill.absolute())
    con = duckdb.connect(":memory:", config=settings)
    try:
        made = ["SET enable_progress_bar = false"]
        made += [
            f"CREATE TABLE {name} ("
            + ", ".join(
                f"{column} {kind}" for column, (kind, _, _) in tables.SCHEMAS[table].items()
            )
            + ")"
            for name, table in (("pool", "experience"), ("questions", "questions"))
        ]
        made += [f"CREATE TEMP TABLE {name} ({columns})" for name, columns in _WORKING.items()]
        con.execute("; ".join(made)).fetchall()
        yield con
    finally:
        con.close()


_WORKING = {
    "planned": "problem_id VARCHAR, role VARCHAR",
    "scored": "rollout_id VARCHAR, policy VARCHAR, mean_entropy FLOAT, mean_logprob FLOAT",
    "collected": "rollout_id VARCHAR, logprobs FLOAT[]",
    "problems": "problem_id VARCHAR",
    "replayed": "problem_id VARCHAR",
    "draws": "count INTEGER, questions INTEGER",
    "wanted": "rollout_id VARCHAR",
    "pool_questions": "problem_id VARCHAR, count INTEGER",
}


def _fill(
    con: duckdb.DuckDBPyConnection, name: str, rows: Sequence[Sequence[Any]] | None = None
) -> None:
    """Empty a working table and put rows into it, whole columns at a time."""
    con.execute(f"DELETE FROM {name}").fetchall()
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        unnests = ", ".join(f"unnest(${i + 1})" for i in range(len(columns)))
        con.execute(f"INSERT INTO {name} SELECT {unnests}", columns).fetchall()


def _glob_safe(paths: Sequence[Path]) -> list[str]:
    """Absolute paths for ``read_parquet``, which would take brackets and stars for patterns."""
    return [tables.literal_path(path.absolute()) for path in paths]


@contextmanager
def _reading(*read: tuple[str, Path, Sequence[str]]) -> Iterator[None]:
    """Around queries: where DuckDB cannot read, say which of these files is at fault.

    Args:
        read: table, file and columns of each.

    Raises:
        InputError: in place of DuckDB's error, naming the file.
    """
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        for table, path, columns in read:
            tables.read_table(table, path, columns)  # the clearer message
        files = " or ".join(str(path) for _, path, _ in read[:3])
        raise InputError(f"{files}: cannot be read: {str(error).splitlines()[0]}") from error


def _fill_problem_ids(con: duckdb.DuckDBPyConnection, problems: Path) -> None:
    """The ids of the problem set into the working table ``problems``."""
    if not problems.exists():
        raise InputError(f"{problems}: no such file; import the problems of the run first")
    tables.check_columns("problems", problems, ["problem_id"])
    con.execute("DELETE FROM problems").fetchall()
    with _reading(("problems", problems, ["problem_id"])):
        con.execute(
            "INSERT INTO problems SELECT DISTINCT problem_id FROM read_parquet($files)",
            {"files": _glob_safe([problems])},
        ).fetchall()


# --- the log ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StepFiles:
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


def _step_files(run: RunDir, step: int) -> _StepFiles:
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
    return _StepFiles(
        rollouts=rollouts,
        verdicts=verdicts,
        scores=_score_parts(run, step, "part"),
        replay_scores=_score_parts(run, step, "replay"),
        plan=plan if plan.exists() else None,
    )


def _check_files(step_files: _StepFiles, check: Callable[..., object]) -> None:
    """Check a step's files: ``tables.check_columns`` their footers, ``tables.read_table`` all."""
    for table, paths, columns in (
        ("rollouts", step_files.rollouts, _ROLLOUT_COLUMNS),
        ("verdicts", step_files.verdicts, _VERDICT_COLUMNS),
        ("scores", [*step_files.scores, *step_files.replay_scores], _SCORE_COLUMNS),
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


def _digests(run: RunDir, step: int, upto: int) -> dict[str, str]:
    """The digest of each step of the log up to ``upto``, that one included.

    Explicit paths (``run.given``) stand for the files of ``step`` only.
    """
    log = RunDir(run.root)
    digests = {str(s): _digest(log, s) for s in log.steps("rollouts") if s <= upto}
    if run.given:
        digests[str(step)] = _digest(run, step)
    return digests


# --- settings that the tables depend on ---------------------------------------------------------


def _table_settings(recipe: Recipe) -> dict[str, Any]:
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


def _all_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings that a step's curation depends on."""
    chosen = recipe.curate.model_dump(mode="json")
    return chosen | _table_settings(recipe) | {
        "samples": recipe.rollout.samples,
        "seed": recipe.seed,
    }  # fmt: skip


# --- from the log to the tables -----------------------------------------------------------------


@dataclass
class _State:
    """How far the tables ``pool`` and ``questions`` of a connection are."""

    last: int = -1
    """The last step taken in; -1 before the first."""
    replay_from: int | None = None
    """The first step with replay; None before a success rate exceeded ``start_success``."""


def _read_plan(con: duckdb.DuckDBPyConnection, plan: Path | None) -> None:
    """A step's plan into the working table ``planned``; empty where none is kept."""
    con.execute("DELETE FROM planned").fetchall()
    if plan is not None:
        with _reading(("plan", plan, ["problem_id", "role"])):
            con.execute(
                "INSERT INTO planned SELECT problem_id, role FROM read_parquet($files)",
                {"files": _glob_safe([plan])},
            ).fetchall()


def _read_scored(con: duckdb.DuckDBPyConnection, paths: Sequence[Path], step: int) -> None:
    """Mean entropies from a step's scores into the working table ``scored``."""
    con.execute("DELETE FROM scored").fetchall()
    if paths:
        with _reading(*(("scores", path, _SCORE_COLUMNS) for path in paths)):
            run_sql(con, "scored", scores=_glob_safe(paths), policy=step_name(step))


def _read_step(
    con: duckdb.DuckDBPyConnection, run: RunDir, step: int, step_files: _StepFiles, recipe: Recipe
) -> None:
    """A step's rows into ``step_rows``, checked.

    Raises:
        InputError: unreadable files, rows of another step, doubled rows, rows without verdicts.
    """
    import duckdb

    mend = f"run: exgrpo verify {run.root} --step {step}"
    try:
        _read_plan(con, step_files.plan)
        _read_scored(con, step_files.scores, step)
        run_sql(
            con,
            "step_rows",
            rollouts=_glob_safe(step_files.rollouts),
            verdicts=_glob_safe(step_files.verdicts),
            root=str(run.root.absolute()).rstrip("/") + "/",
        )
    except duckdb.Error as error:
        _check_files(step_files, tables.read_table)  # the clearer message, where it is one of these
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


def _take_in(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    step: int,
    step_files: _StepFiles,
    recipe: Recipe,
    state: _State,
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


def _derive(
    con: duckdb.DuckDBPyConnection, run: RunDir, upto: int, recipe: Recipe, state: _State
) -> None:
    """Take in the log's steps after ``state.last`` up to ``upto``, in order."""
    log = RunDir(run.root)
    for step in log.steps("rollouts"):
        if state.last < step <= upto:
            _take_in(con, log, step, _step_files(log, step), recipe, state)


def _load(con: duckdb.DuckDBPyConnection, run: RunDir) -> bool:
    """The tables of the run into ``pool`` and ``questions``; False where they are damaged."""
    import duckdb

    try:
        for name, path in (("pool", run.experience), ("questions", run.questions)):
            con.execute(
                f"INSERT INTO {name} BY NAME SELECT * FROM read_parquet($files)",
                {"files": _glob_safe([path])},
            ).fetchall()
    except duckdb.Error:
        con.execute("DELETE FROM pool; DELETE FROM questions").fetchall()
        return False
    return True


def _write_tables(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    state: _State,
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
    _copy(con, "SELECT * FROM pool", run.experience)
    _copy(con, "SELECT * FROM questions ORDER BY problem_id", run.questions)
    tables.write_json(
        run.curation,
        {
            "version": _VERSION,
            "last_step": state.last,
            "replay_from": state.replay_from,
            "settings": _all_settings(recipe),
            "log": {s: digest for s, digest in digests.items() if int(s) <= state.last},
        },
    )


# Tables of another version are derived anew: 2 has rewards.
_VERSION = 2

# Ids and hashes are all different: trying a dictionary of them took most of the time of writing.
_PARQUET = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, DICTIONARY_SIZE_LIMIT 1000"


def _copy(con: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """Write a query's rows to a Parquet file, atomically."""
    with tables.atomic_path(path) as temporary:
        quoted = str(temporary.absolute()).replace("'", "''")
        con.execute(f"COPY ({query}) TO '{quoted}' ({_PARQUET})").fetchall()


def _read_curation(run: RunDir) -> dict[str, Any] | None:
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


def _same_settings(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the tables were derived under these settings; a key unknown then was null."""
    return all(recorded["settings"].get(key) == value for key, value in settings.items())


def _same_prefix(recorded: Mapping[str, Any], digests: Mapping[str, str], upto: int) -> bool:
    """Whether the log up to a step is what the tables were derived from."""
    before = {s: d for s, d in recorded["log"].items() if int(s) <= upto}
    return before == {s: d for s, d in digests.items() if int(s) <= upto}


# --- choosing what a step replays ---------------------------------------------------------------


def replay_candidates(run: RunDir, step: int) -> pl.DataFrame:
    """The stored trajectories of the questions that a step's plan replays.

    Returns:
        ``rollout_id``, ``problem_id`` and ``part`` (the rollouts file that holds the token lists,
        relative to the run directory), sorted by question and time of collection.

    Raises:
        InputError: no plan for the step, or replay questions but no experience.
    """
    import polars as pl

    schema = {"rollout_id": pl.String(), "problem_id": pl.String(), "part": pl.String()}
    plan = _require_plan(run, step)
    planned = tables.read_table("plan", plan, ["role"])
    if not (planned["role"] == "replay").any():
        return pl.DataFrame(schema=schema)
    if not run.experience.exists():
        raise InputError(
            f"{run.experience}: no such file, but the plan of step {step} replays;"
            f" run: exgrpo curate {run.root} --step {step - 1} --rebuild"
        )
    tables.check_columns("experience", run.experience, ["rollout_id", "problem_id", "part"])
    held = ("experience", run.experience, ["rollout_id", "problem_id", "part"])
    with (
        _connect(run.root / _SPILL) as con,
        _reading(held, ("plan", plan, ["problem_id", "role"])),
    ):
        rows = run_sql(
            con,
            "replay_candidates",
            experience=_glob_safe([run.experience]),
            plan=_glob_safe([plan]),
            step=step,
        )
    return pl.DataFrame(rows, schema=schema, orient="row")


def fetch_trajectories(run_root: Path, wanted: pl.DataFrame) -> pl.DataFrame:
    """Token lists of some trajectories; only the files that hold them are opened.

    Args:
        run_root: the run directory, to which ``part`` is relative.
        wanted: with ``rollout_id`` and ``part``, such as :func:`replay_candidates` returns.

    Returns:
        ``wanted`` in its order, with ``prompt_ids`` and ``token_ids`` (lists of int32).

    Raises:
        InputError: a file is missing, or does not hold its trajectory.
    """
    import polars as pl

    schema = tables.polars_schema("rollouts")
    lists = {name: schema[name] for name in ("rollout_id", "prompt_ids", "token_ids")}
    if not wanted.height:
        return wanted.join(pl.DataFrame(schema=lists), on="rollout_id", how="left")
    with _connect(run_root / _SPILL) as con, tempfile.TemporaryDirectory() as folder:
        pairs = list(zip(wanted["rollout_id"], wanted["part"], strict=True))
        _fetch(con, run_root, pairs)
        out = Path(folder) / "trajectories.parquet"
        _copy(con, "SELECT rollout_id, prompt_ids, token_ids FROM trajectories", out)
        found = pl.read_parquet(out).cast(lists)  # type: ignore[arg-type]
    return wanted.join(found, on="rollout_id", how="left", maintain_order="left")


def _fetch(con: duckdb.DuckDBPyConnection, root: Path, wanted: Sequence[tuple[str, str]]) -> None:
    """The token lists of ``(rollout_id, part)`` pairs into the table ``trajectories``."""
    import duckdb

    parts = {part: root / part for part in sorted({part for _, part in wanted})}
    for path in parts.values():
        if not path.exists():
            raise InputError(
                f"{path}: no such file, but stored trajectories lie in it; restore it, or derive"
                f" the experience anew: exgrpo curate {root} --rebuild"
            )
    _fill(con, "wanted", sorted({(rollout,) for rollout, _ in wanted}))
    try:
        run_sql(con, "trajectories", parts=_glob_safe(list(parts.values())))
    except duckdb.Error as error:
        for path in parts.values():
            tables.check_columns("rollouts", path, ["rollout_id", "prompt_ids", "token_ids"])
        raise InputError(f"{root}: {str(error).splitlines()[0]}") from error
    held = {row[0] for row in con.execute("SELECT rollout_id FROM trajectories").fetchall()}
    for rollout, part in wanted:
        if rollout not in held:
            raise InputError(
                f"{parts[part]}: no rollout {rollout}, though the experience says so; derive it"
                f" anew: exgrpo curate {root} --rebuild"
            )


def _choose(
    con: duckdb.DuckDBPyConnection, run: RunDir, step: int, step_files: _StepFiles, recipe: Recipe
) -> None:
    """What the step replays into ``chosen``, from the pool as it stands before the step."""
    _read_plan(con, step_files.plan)
    _choose_planned(con, step, step_files.replay_scores, recipe)


def _choose_planned(
    con: duckdb.DuckDBPyConnection, step: int, replay_scores: Sequence[Path], recipe: Recipe
) -> None:
    """What the replay questions of ``planned`` replay, into ``chosen``."""
    _read_scored(con, replay_scores, step)
    run_sql(
        con,
        "choose",
        selection=recipe.curate.selection,
        seed=recipe.seed,
        step=step,
        count_replayed=recipe.curate.count_replayed,
    )


def _write_curated(con: duckdb.DuckDBPyConnection, run: RunDir, step: int) -> None:
    """Write ``curated/step``: the chosen trajectories whole, or an empty table."""
    chosen = con.execute(
        "SELECT rollout_id, part, collected_step, collected_policy FROM chosen ORDER BY rollout_id"
    ).fetchall()
    if not chosen:
        tables.write_table("curated", tables.frame("curated", []), run.curated(step))
        return
    _fetch(con, run.root, [(rollout, part) for rollout, part, _, _ in chosen])
    _fill(con, "collected")
    scored = {row[0] for row in chosen if row[3] is not None}
    # A step's scores are usually cut like its rollouts: look there first, then everywhere.
    log = RunDir(run.root)
    same_name = {log.scores(row[2]) / Path(row[1]).name for row in chosen if row[3] is not None}
    everywhere = {
        path
        for collected in {row[2] for row in chosen if row[3] is not None}
        for path in log.scores(collected).glob("part-*.parquet")
    }
    for paths in (sorted(p for p in same_name if p.exists()), sorted(everywhere - same_name)):
        found = {row[0] for row in con.execute("SELECT rollout_id FROM collected").fetchall()}
        if paths and scored - found:
            with _reading(*(("scores", path, ["rollout_id", "logprobs"]) for path in paths)):
                run_sql(con, "collected_logprobs", scores=_glob_safe(paths))
    unequal = con.execute(
        "SELECT min(rollout_id) FROM trajectories JOIN collected USING (rollout_id)"
        " WHERE len(token_ids) <> len(collected.logprobs)"
    ).fetchall()[0][0]
    if unequal is not None:
        raise InputError(
            f"{run.root / 'scores'}: the scores of {unequal} are not as long as its response;"
            " the rollouts were made anew: score that step again"
        )
    query = sql_text("curated").rstrip().rstrip(";").replace("$step", str(int(step)))
    _copy(con, query, run.curated(step))


# --- planning the next step ---------------------------------------------------------------------


def bucket_log_weights(
    sizes: Mapping[int, int], samples: int, curate: CurateSettings
) -> dict[int, float]:
    """The log-weight of each bucket that holds questions, as the query gives it.

    Args:
        sizes: questions by count of successes k.
        samples: K.
        curate: ``weights``, ``sigma`` and ``sigma_unit``.
    """
    with _connect() as con:
        held = [(f"{count}/{i}", count) for count, size in sizes.items() for i in range(size)]
        _fill(con, "pool_questions", held)
        return {row[0]: row[2] for row in _bucket_weights(con, samples, curate)}


def _bucket_weights(
    con: duckdb.DuckDBPyConnection, samples: int, curate: CurateSettings
) -> list[tuple[Any, ...]]:
    return run_sql(
        con,
        "bucket_weights",
        weights=curate.weights,
        sigma=curate.sigma,
        sigma_unit=curate.sigma_unit,
        samples=samples,
    )


def bucket_probabilities(log_weights: Mapping[int, float]) -> dict[int, float]:
    """The chance that a single draw goes to each bucket.

    Raises:
        InputError: there is no bucket, or every weight is 0.
    """
    top = max(log_weights.values(), default=-math.inf)
    if top == -math.inf:
        raise InputError(
            "no bucket has any weight, so no question can be drawn for replay;"
            " choose other weights: curate.weights = normal or uniform"
        )
    weights = {count: math.exp(w - top) for count, w in sorted(log_weights.items())}
    total = math.fsum(weights.values())
    return {count: weight / total for count, weight in weights.items()}


def draw_counts(
    sizes: Mapping[int, int], log_weights: Mapping[int, float], draw: int, rng: random.Random
) -> dict[int, int]:
    """How many questions come from each bucket.

    One multinomial draw; what exceeds a bucket's size is handed out one at a time among the
    buckets with room, by the same weights.

    Args:
        sizes: questions by bucket; their sum is at least ``draw``.
        log_weights: of the buckets that hold questions.
        draw: questions wanted.
        rng: only its ``random()`` is used, which is the same in every version of Python.

    Raises:
        InputError: see :func:`bucket_probabilities`.
    """

    def pick(probabilities: Mapping[int, float]) -> int:
        point = rng.random()
        for count, probability in probabilities.items():
            if point < probability:
                return count
            point -= probability
        return max(count for count, p in probabilities.items() if p > 0)  # a rounding remainder

    held = {count: w for count, w in log_weights.items() if sizes[count] > 0}
    probabilities = bucket_probabilities(held)
    counts = dict.fromkeys(probabilities, 0)
    for _ in range(draw):
        counts[pick(probabilities)] += 1
    excess = sum(max(0, n - sizes[count]) for count, n in counts.items())
    counts = {count: min(n, sizes[count]) for count, n in counts.items()}
    for _ in range(excess):
        room = {count: w for count, w in held.items() if counts[count] < sizes[count]}
        counts[pick(bucket_probabilities(room))] += 1
    return counts


def _plan(
    con: duckdb.DuckDBPyConnection, recipe: Recipe, step: int, replaying: bool
) -> tuple[pl.DataFrame, int]:
    """The plan of ``step`` from ``pool``, ``questions`` and ``problems``, and its epoch."""
    curate, samples = recipe.curate, recipe.rollout.samples
    _fill(con, "replayed")
    replay: list[str] = []
    if replaying:
        run_sql(
            con,
            "pool_questions",
            step=step,
            count_replayed=curate.count_replayed,
            weights=curate.weights,
            samples=samples,
            revive_after=curate.revive_after,
        )
        buckets = _bucket_weights(con, samples, curate)
        sizes = {row[0]: row[1] for row in buckets}
        # The margin is for shares that are not exact in binary, such as 0.29 * 100.
        wanted = math.floor(curate.replay_ratio * curate.questions + 1e-9)
        draw = min(sum(sizes.values()), wanted)
        if draw:
            rng = random.Random(tables.row_seed(recipe.seed, "buckets", step))
            counts = draw_counts(sizes, {row[0]: row[2] for row in buckets}, draw, rng)
            _fill(con, "draws", sorted(counts.items()))
            replay = [r[0] for r in run_sql(con, "plan_replay", seed=recipe.seed, step=step)]
            _fill(con, "replayed", [(problem,) for problem in replay])
    fresh = run_sql(
        con,
        "plan_fresh",
        seed=recipe.seed,
        step=step,
        limit=curate.questions - len(replay),
        revive_after=curate.revive_after,
    )
    k, n = ("successes", "attempts")
    if not curate.count_replayed:
        k, n = ("fresh_successes", "fresh_attempts")
    buckets_of = {
        row[0]: row[1:]
        for row in con.execute(
            f"SELECT problem_id, {k}, {n} FROM questions WHERE problem_id IN (SELECT unnest($1))",
            [[row[0] for row in fresh] + replay],
        ).fetchall()
    }
    rows = [
        {
            "step": step,
            "problem_id": problem,
            "role": role,
            "samples": count,
            "successes": buckets_of.get(problem, (None, None))[0],
            "attempts": buckets_of.get(problem, (None, None))[1],
        }
        for role, count, problems in (
            ("fresh", samples, [row[0] for row in fresh]),
            ("replay", samples - 1, replay),
        )
        for problem in problems
    ]
    epoch = con.execute("SELECT coalesce(max(epoch), 0) FROM questions").fetchall()[0][0]
    return tables.frame("plan", rows), max([int(epoch), *(int(row[1]) for row in fresh)])


def all_retired(run: RunDir, step: int) -> bool:
    """Whether a plan of this step or of an earlier one, the run's last, is empty: curate found
    every question mastered, and nothing comes after it."""
    last = max(run.steps("plan"), default=None)
    return (
        last is not None
        and step >= last
        and tables.read_table("plan", run.plan(last), ["step"]).is_empty()
    )


def first_plan(problems: Path, recipe: Recipe, log: Log | None = None) -> pl.DataFrame:
    """The plan of step 0: fresh questions only.

    Args:
        problems: the run's ``problems.parquet``.
        recipe: ``curate.questions`` questions are drawn (all of them where there are fewer), with
            ``rollout.samples`` samples each, by ``seed``.
        log: for a one-line message where there are fewer.

    Returns:
        The ``plan`` table of step 0.

    Raises:
        InputError: no such file, not a problems table, or no problem in it.
    """
    with _connect() as con:
        _fill_problem_ids(con, problems)
        plan, _ = _plan(con, recipe, 0, replaying=False)
    if not plan.height:
        raise InputError(f"{problems}: no problem in this table; nothing can be sampled")
    if log and plan.height < recipe.curate.questions:
        log(
            f"{problems} holds {plan.height} problems, fewer than curate.questions ="
            f" {recipe.curate.questions}: each step takes all of them"
        )
    return plan


def _require_plan(run: RunDir, step: int) -> Path:
    path = run.plan(step)
    if not path.exists():
        mend = (
            f"run: exgrpo rollout {run.root} --step 0"
            if step == 0
            else f"run: exgrpo curate {run.root} --step {step - 1}"
        )
        raise InputError(f"{path}: no plan for step {step}; {mend}")
    return path


# --- other recipes over the same log ------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a recipe plans and replays in a step, given the log of the steps before it."""

    step: int
    replaying: bool
    """Whether replay is on in the step."""
    fresh: list[str]
    """The fresh questions of the plan."""
    replay: list[str]
    """The replay questions of the plan."""
    chosen: list[dict[str, Any]]
    """A trajectory for each replay question: ``problem_id``, ``rollout_id``, ``collected_step``,
    ``mean_entropy`` (nats), ``stale`` (not under the step's policy) and ``bucket``."""
    pool: dict[str, Any]
    """The experience before the step: ``trajectories``, ``questions``, ``easy``, ``medium``,
    ``hard``, ``retired`` and ``age_mean`` (steps; None where the pool is empty)."""


def choices(run: RunDir, recipe: Recipe, log: Log | None = None) -> Iterator[Choice]:
    """What a recipe would have planned and replayed in each step of a run's log.

    The experience is derived in memory from the recorded rollouts and verdicts, step by step; no
    file of the run is read or written beyond that. Before each step its plan is drawn and its
    trajectories are chosen. Entropies are those that were scored for the step, where the trajectory
    was a candidate of the run then, and otherwise those of its collection.

    Args:
        run: the run directory.
        recipe: ``curate``, ``rollout.samples`` and ``seed``.
        log: for a one-line message where the last step is not whole.

    Yields:
        One for each step that has rollouts, and one for the step after the last.

    Raises:
        InputError: no problems, or a step of the log before the last that is not whole.
    """
    run = RunDir(run.root)
    steps = run.steps("rollouts")
    state = _State()
    with tempfile.TemporaryDirectory(prefix="exgrpo-") as spill, _connect(Path(spill)) as con:
        _fill_problem_ids(con, run.problems)
        for step in steps:
            step_files, unfinished = None, ""
            try:
                step_files = _step_files(run, step)
            except InputError as error:
                if step < steps[-1]:
                    raise
                unfinished = str(error)
            scores = step_files.replay_scores if step_files else []
            yield _choice(con, step, scores, recipe, state)
            if step_files is None:
                if log:
                    log(f"step {step} is planned, but not taken in: {unfinished}")
                return
            _take_in(con, run, step, step_files, recipe, state)
        if steps:
            yield _choice(con, steps[-1] + 1, [], recipe, state)


def _choice(
    con: duckdb.DuckDBPyConnection,
    step: int,
    replay_scores: Sequence[Path],
    recipe: Recipe,
    state: _State,
) -> Choice:
    """The plan and the choice of a step, from ``pool`` and ``questions`` before it."""
    replaying = state.replay_from is not None and state.replay_from <= step
    plan, _ = _plan(con, recipe, step, replaying)
    rows = plan.select("problem_id", "role").rows()
    _fill(con, "planned", rows)
    _choose_planned(con, step, replay_scores, recipe)
    chosen = con.execute(
        "SELECT problem_id, rollout_id, collected_step, mean_entropy, stale, bucket FROM chosen"
    )
    names = [column[0] for column in chosen.description or []]
    picked = [dict(zip(names, row, strict=True)) for row in chosen.fetchall()]
    (statement,) = con.extract_statements(sql_text("pool_state"))
    result = con.execute(statement, {"step": step, "revive_after": recipe.curate.revive_after})
    numbers = [column[0] for column in result.description or []]
    return Choice(
        step=step,
        replaying=replaying,
        fresh=[problem for problem, role in rows if role == "fresh"],
        replay=[problem for problem, role in rows if role == "replay"],
        chosen=picked,
        pool=dict(zip(numbers, result.fetchall()[0], strict=True)),
    )


# --- the stage ----------------------------------------------------------------------------------


def replay_on(run: RunDir, step: int) -> bool:
    """Whether replay was on in a step that was curated (whether or not it replayed anything).

    Raises:
        InputError: the step was not curated.
    """
    metrics = run.root / "metrics" / step_name(step) / "curate.json"
    if metrics.exists():
        return bool(json.loads(metrics.read_text(encoding="utf-8")).get("replay/started"))
    recorded = _read_curation(run)
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
    state = _State()
    run = RunDir(run.root)
    digests = _digests(run, upto, upto)  # taken before reading: what changes meanwhile is noticed
    with _connect(run.root / _SPILL) as con:
        _derive(con, run, upto, recipe, state)
        _write_tables(con, run, state, recipe, digests)
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


def curate(
    run: RunDir,
    step: int,
    recipe: Recipe,
    *,
    rebuild: bool = False,
    force: bool = False,
    log: Log | None = None,
) -> dict[str, Any]:
    """Curate one step: choose what it replays, take in what it sampled, plan the next one.

    Reads the step's plan, rollouts, verdicts and (where there are any) scores, and the tables
    ``experience`` and ``questions``; writes ``curated/step``, the two tables, and last of all the
    plan of ``step + 1``, whose existence marks the step as curated. The tables go on from those
    on disk when these were derived from the same log under the same settings, and otherwise are
    derived anew. A step that is curated already, from an unchanged log under the same settings, is
    left as it is. What later stages have used (a plan that was sampled, replay that was trained
    on) is never overwritten without ``force``.

    Args:
        run: the run directory.
        step: t.
        recipe: ``curate``, ``rollout.samples`` and ``seed``.
        rebuild: derive the tables from the log even where they can go on.
        force: do a step again that is curated already.
        log: for one-line messages.

    Returns:
        The step's metrics (flat, as in metrics.jsonl) with ``skipped``, ``rebuilt`` and
        ``finished`` (no question is left for the next step).

    Raises:
        InputError: missing or unreadable plan, problems, rollouts or verdicts; a plan of another
            problem set; a log that is not whole.
    """
    started = time.monotonic()
    say = log or (lambda _: None)
    plan = _require_plan(run, step)
    step_files = _step_files(run, step)
    recorded = _read_curation(run)
    latest = max(step, recorded["last_step"] if recorded else step)
    digests = _digests(run, step, latest)  # taken before reading: what changes meanwhile is noticed
    settings = _all_settings(recipe)
    metrics_path = run.root / "metrics" / step_name(step) / "curate.json"
    outputs = (run.curated(step), run.plan(step + 1), metrics_path)
    if (
        not (rebuild or force)
        and recorded is not None
        and recorded["last_step"] >= step
        and _same_settings(recorded, settings)
        and _same_prefix(recorded, digests, step)
        and all(path.exists() for path in outputs)
        and not _chosen_before(run.curated(step), step_files.replay_scores)
    ):
        say(f"step {step} is curated already")
        metrics: dict[str, Any] = json.loads(metrics_path.read_text(encoding="utf-8"))
        finished = not tables.read_table("plan", run.plan(step + 1), ["problem_id"]).height
        return metrics | {"skipped": True, "rebuilt": False, "finished": finished}

    _check_files(step_files, tables.check_columns)
    state = _State()
    with _connect(run.root / _SPILL) as con:
        _fill_problem_ids(con, run.problems)
        _check_plan(con, run, plan)
        goes_on = (
            not rebuild
            and recorded is not None
            and recorded["last_step"] < step
            and _same_settings(recorded, _table_settings(recipe))
            and _same_prefix(recorded, digests, recorded["last_step"])
        )
        if goes_on and recorded is not None:
            goes_on = _load(con, run)
            if goes_on:
                state = _State(recorded["last_step"], recorded["replay_from"])
        earlier = [s for s in run.steps("rollouts") if s < step]
        rebuilt = not goes_on and bool(earlier)
        if rebuilt:
            say(f"deriving the experience anew from {len(earlier)} earlier steps")
        _derive(con, run, step - 1, recipe, state)

        _choose(con, run, step, step_files, recipe)
        replaying = state.replay_from is not None and state.replay_from <= step
        _take_in(con, run, step, step_files, recipe, state)
        _refuse_unjudged(con, run, step)
        planning = state.replay_from is not None and state.replay_from <= step + 1
        next_plan, epoch = _plan(con, recipe, step + 1, planning)
        metrics = _metrics(con, step, recipe)
        missing = con.execute(
            "SELECT count(*), min(problem_id) FROM planned"
            " WHERE role = 'replay' AND problem_id NOT IN (SELECT problem_id FROM chosen)"
        ).fetchall()[0]
        if missing[0]:
            say(
                f"{missing[0]} planned replay questions have no stored success (the first is"
                f" {missing[1]}); their groups are trained without one"
            )

        if force or not (run.policy(step + 1).exists() and run.curated(step).exists()):
            _write_curated(con, run, step)
        else:
            say(f"{run.curated(step)} is left as it is: step {step} was trained on it")
            metrics = _keep_replay_metrics(metrics, metrics_path)
        _catch_up(con, run, latest, recipe, state, say)
        _write_tables(con, run, state, recipe, digests)

    kept = not force and run.rollouts(step + 1).exists() and run.plan(step + 1).exists()
    if kept:
        say(f"{run.plan(step + 1)} is left as it is: step {step + 1} was sampled by it")
        next_plan = tables.read_table("plan", run.plan(step + 1))
    roles = next_plan["role"].to_list()
    metrics |= {
        "replay/started": int(replaying),
        "plan/fresh": roles.count("fresh"),
        "plan/replay": roles.count("replay"),
        "plan/epoch": epoch,
        "curate/seconds": time.monotonic() - started,
    }
    run.record(step, "curate", metrics)
    if not kept:
        tables.write_table("plan", next_plan, run.plan(step + 1))
    _say_result(say, step, recipe, metrics, next_plan.height)
    return metrics | {"skipped": False, "rebuilt": rebuilt, "finished": not next_plan.height}


def _refuse_unjudged(con: duckdb.DuckDBPyConnection, run: RunDir, step: int) -> None:
    """A verifier that fails everywhere would pass for a policy that solves nothing."""
    rows, errors = con.execute(
        "SELECT count(*), count(*) FILTER (WHERE status = 'error') FROM step_rows"
    ).fetchall()[0]
    if rows and rows == errors:
        raise InputError(
            f"{run.verdicts(step)}: every verdict is an error; exgrpo verify {run.root} --explain"
            f" ROLLOUT_ID says why; then: exgrpo verify {run.root} --step {step} --force"
        )


def _keep_replay_metrics(metrics: dict[str, Any], recorded: Path) -> dict[str, Any]:
    """The metrics with those of replay as they were recorded: the step was trained on that."""
    if not recorded.exists():
        return metrics
    old = json.loads(recorded.read_text(encoding="utf-8"))
    kept = {k: v for k, v in metrics.items() if not k.startswith("replay/")}
    return kept | {k: v for k, v in old.items() if k.startswith("replay/")}


def _chosen_before(curated: Path, replay_scores: Sequence[Path]) -> bool:
    """Whether scores of the candidates came only after the choice was made."""
    chosen_at = curated.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > chosen_at for path in replay_scores)


def _catch_up(
    con: duckdb.DuckDBPyConnection,
    run: RunDir,
    latest: int,
    recipe: Recipe,
    state: _State,
    say: Log,
) -> None:
    """Take in the later steps that the tables held before an earlier step was curated again."""
    try:
        _derive(con, run, latest, recipe, state)
    except InputError as error:
        say(f"the experience goes up to step {state.last} only: {error}")


def _check_plan(con: duckdb.DuckDBPyConnection, run: RunDir, plan: Path) -> None:
    """Refuse a plan that was made for another problem set."""
    with _reading(("plan", plan, ["problem_id", "role"])):
        unknown = con.execute(
            "SELECT count(*), min(problem_id) FROM read_parquet($files)"
            " WHERE problem_id NOT IN (SELECT problem_id FROM problems)",
            {"files": _glob_safe([plan])},
        ).fetchall()[0]
    if unknown[0]:
        raise InputError(
            f"{plan}: {unknown[0]} planned questions are not in {run.problems} (the first is"
            f" {unknown[1]}); the plan is for another problem set: restore the problems, or"
            " remove the plan and what was sampled by it"
        )


def _metrics(con: duckdb.DuckDBPyConnection, step: int, recipe: Recipe) -> dict[str, Any]:
    """The step's numbers; what has no value (the mean of no replayed rows) is left out."""
    (statement,) = con.extract_statements(sql_text("metrics"))
    result = con.execute(
        statement,
        {"step": step, "revive_after": recipe.curate.revive_after},
    )
    names = [column[0] for column in result.description or []]
    values = result.fetchall()[0]
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _say_result(say: Log, step: int, recipe: Recipe, metrics: Mapping[str, Any], n: int) -> None:
    say(
        f"step {step}: success {metrics['success_rate']:.3f};"
        f" pool {metrics['pool/trajectories']} trajectories of {metrics['pool/questions']}"
        f" questions, {metrics['pool/retired']} retired; replays {metrics['replay/questions']}"
    )
    if not n:
        say("every question is retired: nothing is left to sample")
        return
    say(
        f"planned step {step + 1}: {metrics['plan/fresh']} fresh and {metrics['plan/replay']}"
        f" replay questions (epoch {metrics['plan/epoch']})"
    )
    if n < recipe.curate.questions:
        say(f"only {n} of {recipe.curate.questions} questions are left to sample")
