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

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import choose, chosen_before, write_curated
from exgrpo_cli.experience.database import SPILL, connect, fill_problem_ids, sql_text
from exgrpo_cli.experience.log import check_files, files_of_step, log_digests
from exgrpo_cli.experience.plan import check_plan, draw_plan, require_plan
from exgrpo_cli.experience.pool import (
    State,
    all_settings,
    catch_up,
    derive,
    load_tables,
    read_curation,
    same_prefix,
    same_settings,
    table_settings,
    take_in,
    write_tables,
)
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.step import Result, Step

if TYPE_CHECKING:
    import duckdb


def curate(
    of: Step,
    recipe: Recipe,
    *,
    rebuild: bool = False,
    force: bool = False,
    log: Log | None = None,
) -> Result:
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
    assert of.run is not None
    run, step = of.run, of.number
    plan = require_plan(run, step)
    step_files = files_of_step(run, step)
    recorded = read_curation(run)
    latest = max(step, recorded["last_step"] if recorded else step)
    # Taken before reading: what changes meanwhile is noticed.
    digests = log_digests(run, step, latest)
    settings = all_settings(recipe)
    metrics_path = run.root / "metrics" / step_name(step) / "curate.json"
    outputs = (run.curated(step), run.plan(step + 1), metrics_path)
    if (
        not (rebuild or force)
        and recorded is not None
        and recorded["last_step"] >= step
        and same_settings(recorded, settings)
        and same_prefix(recorded, digests, step)
        and all(path.exists() for path in outputs)
        and not chosen_before(run.curated(step), step_files.replay_scores)
    ):
        say(f"step {step} is curated already")
        metrics: dict[str, Any] = json.loads(metrics_path.read_text(encoding="utf-8"))
        finished = not tables.read_table("plan", run.plan(step + 1), ["problem_id"]).height
        return Result(skipped=1, finished=finished, metrics=metrics | {"rebuilt": False})

    check_files(step_files, tables.check_columns)
    state = State()
    with connect(run.root / SPILL) as con:
        fill_problem_ids(con, run.problems)
        check_plan(con, run, plan)
        goes_on = (
            not rebuild
            and recorded is not None
            and recorded["last_step"] < step
            and same_settings(recorded, table_settings(recipe))
            and same_prefix(recorded, digests, recorded["last_step"])
        )
        if goes_on and recorded is not None:
            goes_on = load_tables(con, run)
            if goes_on:
                state = State(recorded["last_step"], recorded["replay_from"])
        earlier = [s for s in run.steps("rollouts") if s < step]
        rebuilt = not goes_on and bool(earlier)
        if rebuilt:
            say(f"deriving the experience anew from {len(earlier)} earlier steps")
        derive(con, run, step - 1, recipe, state)

        choose(con, run, step, step_files, recipe)
        replaying = state.replay_from is not None and state.replay_from <= step
        take_in(con, run, step, step_files, recipe, state)
        _refuse_unjudged(con, run, step)
        planning = state.replay_from is not None and state.replay_from <= step + 1
        next_plan, epoch = draw_plan(con, recipe, step + 1, planning)
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
            write_curated(con, run, step)
        else:
            say(f"{run.curated(step)} is left as it is: step {step} was trained on it")
            metrics = _keep_replay_metrics(metrics, metrics_path)
        catch_up(con, run, latest, recipe, state, say)
        write_tables(con, run, state, recipe, digests)

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
    return Result(done=1, finished=not next_plan.height, metrics=metrics | {"rebuilt": rebuilt})


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
