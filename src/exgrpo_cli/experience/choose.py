"""What a step replays: for each planned question one of its stored trajectories."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.database import (
    SPILL,
    connect,
    copy_query,
    fill,
    glob_safe,
    reading,
    run_sql,
    sql_text,
)
from exgrpo_cli.experience.log import StepFiles
from exgrpo_cli.experience.plan import require_plan
from exgrpo_cli.experience.pool import read_plan, read_scored
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir

if TYPE_CHECKING:
    import duckdb
    import polars as pl


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
    plan = require_plan(run, step)
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
        connect(run.root / SPILL) as con,
        reading(held, ("plan", plan, ["problem_id", "role"])),
    ):
        rows = run_sql(
            con,
            "replay_candidates",
            experience=glob_safe([run.experience]),
            plan=glob_safe([plan]),
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
    with connect(run_root / SPILL) as con, tempfile.TemporaryDirectory() as folder:
        pairs = list(zip(wanted["rollout_id"], wanted["part"], strict=True))
        _fetch(con, run_root, pairs)
        out = Path(folder) / "trajectories.parquet"
        copy_query(con, "SELECT rollout_id, prompt_ids, token_ids FROM trajectories", out)
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
    fill(con, "wanted", sorted({(rollout,) for rollout, _ in wanted}))
    try:
        run_sql(con, "trajectories", parts=glob_safe(list(parts.values())))
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


def choose(
    con: duckdb.DuckDBPyConnection, run: RunDir, step: int, step_files: StepFiles, recipe: Recipe
) -> None:
    """What the step replays into ``chosen``, from the pool as it stands before the step."""
    read_plan(con, step_files.plan)
    choose_planned(con, step, step_files.replay_scores, recipe)


def choose_planned(
    con: duckdb.DuckDBPyConnection, step: int, replay_scores: Sequence[Path], recipe: Recipe
) -> None:
    """What the replay questions of ``planned`` replay, into ``chosen``."""
    read_scored(con, replay_scores, step)
    run_sql(
        con,
        "choose",
        selection=recipe.curate.selection,
        seed=recipe.seed,
        step=step,
        count_replayed=recipe.curate.count_replayed,
    )


def write_curated(con: duckdb.DuckDBPyConnection, run: RunDir, step: int) -> None:
    """Write ``curated/step``: the chosen trajectories whole, or an empty table."""
    chosen = con.execute(
        "SELECT rollout_id, part, collected_step, collected_policy FROM chosen ORDER BY rollout_id"
    ).fetchall()
    if not chosen:
        tables.write_table("curated", tables.frame("curated", []), run.curated(step))
        return
    _fetch(con, run.root, [(rollout, part) for rollout, part, _, _ in chosen])
    fill(con, "collected")
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
            with reading(*(("scores", path, ["rollout_id", "logprobs"]) for path in paths)):
                run_sql(con, "collected_logprobs", scores=glob_safe(paths))
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
    copy_query(con, query, run.curated(step))


def chosen_before(curated: Path, replay_scores: Sequence[Path]) -> bool:
    """Whether scores of the candidates came only after the choice was made."""
    chosen_at = curated.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > chosen_at for path in replay_scores)
