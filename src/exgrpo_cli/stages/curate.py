"""The curate stage: which experience is kept, what a step replays, what the next one samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import by_policy, choose, write_curated
from exgrpo_cli.experience.curation import Curation, recorded_metrics
from exgrpo_cli.experience.history import StepFiles, history_digests, read_plan
from exgrpo_cli.experience.plan import all_retired, check_plan, draw_plan, require_plan
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.step import Result, Step


def curate(
    step: Step, recipe: Recipe, *, rebuild: bool = False, force: bool = False, log: Log = quiet
) -> Result:
    """Curate one step: choose what it replays, take in what it sampled, plan the next one.

    Reads the step's plan, rollouts, verdicts and (where there are any) scores, and the tables
    ``experience`` and ``questions``; writes ``curated/step``, the two tables, and last of all the
    plan of the next step, whose existence marks the step as curated. The tables go on from those on
    disk when these were derived from the same history under the same settings, and otherwise are
    derived anew. A step that is curated already, from an unchanged history under the same settings,
    is left as it is. What later stages have used (a plan that was sampled, replay that was trained
    on) is never overwritten without ``force``. The method: arXiv 2510.02245, "Experience
    Management".

    Args:
        step: of a run directory, without loose files (see :func:`exgrpo_cli.runs.prepare.adopt`).
        recipe: ``curate``, ``rollout.samples`` and ``seed``.
        rebuild: derive the tables from the history even where they can go on.
        force: do a step again that is curated already.
        log: gets the notes and the summary, as they come.

    Returns:
        The step's metrics, with ``rebuilt``: whether earlier steps had to be taken in anew.

    Raises:
        InputError: missing or unreadable plan, problems, rollouts or verdicts; a plan of another
            problem set; a history that is not whole.
    """
    started = time.monotonic()
    if step.run is None or step.given:
        raise InputError("curation works in a run directory, on its own files: adopt loose ones")
    run, t, notes = step.run, step.number, list[str]()

    def note(line: str) -> None:
        notes.append(line)
        log(line)

    plan = require_plan(run, t)
    files = StepFiles.of(run, t)
    found = Curation.read(run, note)
    latest = max(t, found.last_step if found else t)
    # Taken before reading: what changes meanwhile is noticed.
    digests = history_digests(run, latest)
    if not (rebuild or force) and found is not None and found.covers(files, recipe, digests):
        log(f"step {t} is curated already")
        known = recorded_metrics(run, t) or {}
        return Result(
            skipped=1, finished=all_retired(run, t + 1), metrics={**known, "rebuilt": False}
        )

    with Experience.open(run, recipe) as experience:
        check_plan(experience, plan, t)
        earlier = sum(other < t for other in run.steps("rollouts"))
        goes_on = not rebuild and experience.resume(found, t - 1, digests)
        rebuilt = not goes_on and earlier > 0
        if rebuilt:
            note(f"deriving the experience anew from {earlier} earlier steps")
        experience.derive(t - 1)

        read_plan(experience.con, plan, t)
        choose(experience, t, files)
        trained = not force and run.policy(t + 1).exists() and run.curated(t).exists()
        if trained:
            experience.use_recorded(t)
        experience.take_in(files)
        _refuse_unjudged(experience, step)
        next_plan, epoch = draw_plan(experience, t + 1)

        metrics = _metrics(experience, t)
        _say_of_choice(experience, note)
        if files.imports:
            _say_of_imports(experience, note)
        if not trained:
            _say_of_engine(run, write_curated(experience, t), note)
        else:
            note(f"{run.curated(t)} is left as it is: step {t} was trained on it")
            metrics = _with_replay_of(recorded_metrics(run, t), metrics)
        try:  # the later steps that the tables held before this one was curated again
            experience.derive(latest)
        except InputError as error:
            note(f"the experience goes up to step {experience.last_step} only: {error}")
        experience.write(digests)

    kept = not force and run.rollouts(t + 1).exists() and run.plan(t + 1).exists()
    if kept:
        note(f"{run.plan(t + 1)} is left as it is: step {t + 1} was sampled by it")
        next_plan = tables.read_table("plan", run.plan(t + 1))
    roles = next_plan["role"].to_list()
    metrics |= {
        "replay/started": int(experience.replays(t)),
        "plan/fresh": roles.count("fresh"),
        "plan/replay": roles.count("replay"),
        "plan/epoch": epoch,
        "curate/seconds": time.monotonic() - started,
    }
    run.record(t, "curate", metrics)
    if not kept:
        tables.write_table("plan", next_plan, run.plan(t + 1))
    _summarise(t, metrics, log)
    if not roles:
        weighed = " or weighs 0 by curate.fresh" * (recipe.curate.fresh != "1")
        note(f"every question is retired{weighed}: nothing is left to sample")
    elif len(roles) < recipe.curate.questions:
        note(f"only {len(roles)} of {recipe.curate.questions} questions are left to sample")
    return Result(
        done=1, finished=not roles, metrics={**metrics, "rebuilt": rebuilt}, notes=tuple(notes)
    )


def _refuse_unjudged(experience: Experience, step: Step) -> None:
    """A verifier that fails everywhere would pass for a policy that solves nothing."""
    rows, errors = experience.con.execute(
        "SELECT count(*), count(*) FILTER (WHERE status = 'error') FROM step_rows"
    ).fetchall()[0]
    if rows and rows == errors:
        root = experience.run.root
        raise InputError(
            f"{step.verdicts}: every verdict is an error; exgrpo verify {root} --explain ROLLOUT_ID"
            f" says why; then: exgrpo verify {root} --step {step.number} --force"
        )


def _say_of_choice(experience: Experience, note: Log) -> None:
    """Planned replay questions that have nothing to replay, and choices by other policies."""
    con = experience.con
    count, first = con.execute("SELECT count(*), min(problem_id) FROM unsampled").fetchall()[0]
    if count:
        note(
            f"{count} planned replay questions were not sampled (the first is {first}; are their"
            " prompts longer than rollout.max_prompt_tokens?); nothing is replayed of them"
        )
    stale, scored = con.execute(
        "SELECT sum(unscored), sum(candidates) FROM chosen WHERE rank = 1"
        " HAVING sum(unscored) < sum(candidates) AND sum(unscored) > 0"
    ).fetchone() or (0, 0)
    if stale and by_policy(experience.recipe):
        note(
            f"{stale} of {scored} replay candidates were not scored under the step's policy; those"
            f" that were come first. To score all: exgrpo score {experience.run.root}"
        )
    count, first = con.execute(
        "SELECT count(*), min(problem_id) FROM planned"
        " WHERE role = 'replay' AND problem_id NOT IN (SELECT problem_id FROM chosen)"
        " AND problem_id NOT IN (SELECT problem_id FROM unsampled)"
    ).fetchall()[0]
    if count:
        note(
            f"{count} planned replay questions have no stored trajectory (the first is {first});"
            " their groups are trained without one"
        )


def _say_of_imports(experience: Experience, note: Log) -> None:
    rows, right, stored = experience.con.execute(
        "SELECT count(*), count(*) FILTER (WHERE correct),"
        " count(*) FILTER (WHERE rollout_id IN (SELECT rollout_id FROM experience))"
        " FROM import_rows"
    ).fetchall()[0]
    note(f"of {rows} imported trajectories {right} are right, and {stored} are in the pool now")


def _say_of_engine(run: RunDir, collected: list[int], note: Log) -> None:
    """Replayed trajectories whose exact log-probabilities are gone, or were never made, in a run
    that scores."""
    if collected and run.steps("scores"):
        steps = ", ".join(str(step) for step in sorted(set(collected))[:5])
        note(
            f"{len(collected)} replayed trajectories have no scores of the step that collected them"
            f" (steps {steps}{', ...' if len(set(collected)) > 5 else ''}): pi_past is the rollout"
            " engine's"
        )


def _metrics(experience: Experience, step: int) -> dict[str, Any]:
    """The step's numbers; what has no value (the mean of no replayed rows) is left out."""
    (row,) = experience.sql("metrics", step=step)
    return {name: value for name, value in row.items() if value is not None}


def _with_replay_of(recorded: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new metrics with those of replay as recorded: the step was trained on that."""
    if recorded is None:
        return new
    kept = {k: v for k, v in new.items() if not k.startswith("replay/")}
    return kept | {k: v for k, v in recorded.items() if k.startswith("replay/")}


def _summarise(step: int, metrics: Mapping[str, Any], log: Log) -> None:
    log(
        f"step {step}: success {metrics['success_rate_fresh']:.3f};"
        f" pool {metrics['pool/trajectories']} trajectories of {metrics['pool/questions']}"
        f" questions, {metrics['pool/retired']} retired; replays {metrics['replay/questions']}"
    )
    if metrics["plan/fresh"] or metrics["plan/replay"]:
        log(
            f"planned step {step + 1}: {metrics['plan/fresh']} fresh and {metrics['plan/replay']}"
            f" replay questions (epoch {metrics['plan/epoch']})"
        )
