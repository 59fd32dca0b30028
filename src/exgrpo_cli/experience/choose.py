"""What a step replays: for each planned question one of its stored trajectories."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.experience.curation import refuse_changed_tables
from exgrpo_cli.experience.database import connect, fill, reading, run_sql, spill_of, sql_text
from exgrpo_cli.experience.history import StepFiles, read_scored, read_unsampled
from exgrpo_cli.experience.plan import require_plan
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.recipe.rules import mentions
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal, write_query
from exgrpo_cli.tables.values import faulty

if TYPE_CHECKING:
    import duckdb
    import polars as pl

_LISTS = ("rollout_id", "prompt_ids", "token_ids", "logprobs")


def choose(experience: Experience, step: int, files: StepFiles | None) -> None:
    """What the replay questions of ``planned`` replay, into ``chosen``.

    Args:
        experience: as it stands before the step.
        files: of the step, with the candidates' scores under its policy where they were scored;
            None where nothing of it was sampled yet.
    """
    con = experience.con
    read_scored(con, files, replay=True)
    fill(con, "unsampled")
    if files and experience.recipe.rollout.samples > 1:
        read_unsampled(con, files)
    experience.read_uses(step - 1)
    rule = experience.recipe.curate.choose
    experience.sql(
        "choose",
        step=step,
        by_policy=by_policy(experience.recipe),
        in_pool=mentions(rule, "pool_newness"),
    )
    experience.use(step)


def by_policy(recipe: Recipe) -> bool:
    """Whether the recipe chooses by what scores under the step's policy say."""
    return mentions(recipe.curate.choose, "mean_entropy", "mean_logprob")


def write_curated(experience: Experience, step: int) -> list[int]:
    """Write ``curated/step``: the chosen trajectories whole, or an empty table. Gives the steps
    that collected those whose log-probabilities are the engine's."""
    con, run = experience.con, experience.run
    chosen = con.execute(
        "SELECT rollout_id, part, collected_step, collected_policy FROM chosen ORDER BY rollout_id"
    ).fetchall()
    if not chosen:
        tables.write_table("curated", tables.frame("curated", []), run.curated(step))
        return []
    _fetch(con, run.root, [(rollout, part) for rollout, part, _, _ in chosen])
    fill(con, "collected")
    scored = {rollout: (part, at) for rollout, part, at, policy in chosen if policy is not None}
    # A step's scores are usually cut like its rollouts: look there first, then everywhere.
    same_name = {
        run.root / "scores" / Path(part).parent.name / Path(part).name
        for part, _ in scored.values()
    }
    everywhere = {
        path
        for at in {at for _, at in scored.values()}
        for path in run.scores(at).glob("part-*.parquet")
    }
    for paths in (sorted(p for p in same_name if p.exists()), sorted(everywhere - same_name)):
        found = {row[0] for row in con.execute("SELECT rollout_id FROM collected").fetchall()}
        if paths and scored.keys() - found:
            with reading(*(("scores", path, ["rollout_id", "logprobs"]) for path in paths)):
                run_sql(con, "collected_logprobs", scores=literal(paths))
            _check_lists(con, "collected", "scores", ["rollout_id", "logprobs"], paths)
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
    write_query(con, query, run.curated(step))
    found = {row[0] for row in con.execute("SELECT rollout_id FROM collected").fetchall()}
    return [at for rollout, _, at, _ in chosen if rollout not in found]


def replay_candidates(run: RunDir, step: int) -> pl.DataFrame:
    """The stored trajectories of the questions that a step's plan replays.

    Returns:
        ``rollout_id``, ``problem_id`` and ``part`` (the rollouts file that holds the token lists,
        relative to the run directory), sorted by question and time of collection.
    """
    import polars as pl

    columns = ["rollout_id", "problem_id", "part"]
    schema = dict.fromkeys(columns, pl.String())
    plan = require_plan(run, step)
    if "replay" not in tables.read_table("plan", plan, ["role"])["role"]:
        return pl.DataFrame(schema=schema)
    if not run.experience.exists():
        raise InputError(
            f"{run.experience}: no such file, but the plan of step {step} replays;"
            f" run: exgrpo curate {run.root} --step {step - 1} --rebuild"
        )
    refuse_changed_tables(run)
    tables.check_columns("experience", run.experience, columns)
    held = ("experience", run.experience, columns)
    with connect(spill_of(run.root)) as con, reading(held, ("plan", plan, ["problem_id", "role"])):
        rows = run_sql(
            con,
            "replay_candidates",
            experience=literal([run.experience]),
            plan=literal([plan]),
            step=step,
        )
    return pl.DataFrame(rows, schema=schema)


def fetch_trajectories(run_root: Path, wanted: pl.DataFrame) -> pl.DataFrame:
    """Token lists of some trajectories; only the files that hold them are opened.

    Args:
        run_root: the run directory, to which ``part`` is relative.
        wanted: with ``rollout_id`` and ``part``, such as :func:`replay_candidates` returns.

    Returns:
        ``wanted`` in its order, with ``prompt_ids`` and ``token_ids`` (lists of int32).
    """
    import polars as pl

    schema = tables.polars_schema("rollouts")
    lists = {name: schema[name] for name in ("rollout_id", "prompt_ids", "token_ids")}
    if not wanted.height:
        return wanted.join(pl.DataFrame(schema=lists), on="rollout_id", how="left")
    with connect(spill_of(run_root)) as con, tempfile.TemporaryDirectory() as folder:
        _fetch(con, run_root, list(zip(wanted["rollout_id"], wanted["part"], strict=True)))
        out = Path(folder) / "trajectories.parquet"
        write_query(con, "SELECT rollout_id, prompt_ids, token_ids FROM trajectories", out)
        found = pl.read_parquet(out).cast(lists)  # type: ignore[arg-type]
    return wanted.join(found, on="rollout_id", how="left", maintain_order="left")


def _check_lists(
    con: duckdb.DuckDBPyConnection,
    working: str,
    table: str,
    columns: Sequence[str],
    paths: Iterable[Path],
) -> None:
    """Refuse what was fetched into a working table where a value in it cannot be."""
    wrong, rows, different = con.execute(
        f"SELECT count(*) FILTER (WHERE {faulty(table, columns)}), count(*),"
        f" count(DISTINCT rollout_id) FROM {working}"
    ).fetchall()[0]
    if wrong or rows != different:
        for path in paths:
            tables.read_table(table, path, columns)
        tables.read_table(table, list(paths), columns)


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
        run_sql(con, "trajectories", parts=literal(parts.values()))
    except duckdb.Error as error:
        for path in parts.values():
            tables.read_table("rollouts", path, _LISTS)
        raise InputError(f"{root}: {first_line(error)}") from error
    _check_lists(con, "trajectories", "rollouts", _LISTS, parts.values())
    held = {row[0] for row in con.execute("SELECT rollout_id FROM trajectories").fetchall()}
    for rollout, part in wanted:
        if rollout not in held:
            raise InputError(
                f"{parts[part]}: no rollout {rollout}, though the experience says so; derive it"
                f" anew: exgrpo curate {root} --rebuild"
            )
