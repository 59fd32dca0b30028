"""What a run needs before its first step: the recipe, the problems, loose files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import engine_count
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import (
    SAMPLED_BY,
    ProblemSettings,
    Recipe,
    differences,
    load_recipe,
    to_toml,
    with_absolute_paths,
)
from exgrpo_cli.retention import keep_policy
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.provenance import record_provenance
from exgrpo_cli.step import Step

if TYPE_CHECKING:
    from exgrpo_cli.problems.rows import Problem


def prepare(run: RunDir, recipe: Recipe, log: Log = quiet) -> Recipe:
    """Put the recipe and the problems into the run directory, where they are not there yet.

    A changed recipe replaces ``recipe.toml``, and the keys that changed are said. Its paths are
    made absolute. Where and with what it was started is added to ``provenance.json``.

    Raises:
        InputError: no problems given, or none that fit; settings that cannot train, or that this
            run was begun without; problem sets of evaluations that are not there.
    """
    from exgrpo_cli.engines.limits import positions
    from exgrpo_cli.models import check_policy

    if run.root.exists() and not run.root.is_dir():
        raise InputError(f"{run.root}: is a file; a run is a directory")
    if not recipe.model.path:
        raise InputError("no model given: set model.path in the recipe, or give --model")
    check_policy(recipe.model.path)
    _check_lag(run, recipe)
    recipe = with_absolute_paths(recipe)
    for name, source in recipe.evaluate.problems.items():
        if recipe.evaluate.every and not Path(source).exists():
            raise InputError(f"evaluate.problems.{name} = {source!r}: no such file or folder")
    if recipe.curate.replay_ratio > 0 and recipe.rollout.samples < 2:
        raise InputError(
            f"rollout.samples = {recipe.rollout.samples}: a success retires its question, and none"
            " would ever be replayed; raise samples, or set curate.replay_ratio = 0"
        )
    changed = {}
    own = run.own_recipe(needed=False)
    if own is not None:
        changed = differences(with_absolute_paths(load_recipe(own)), recipe)
    latest = max(run.steps("policy"), default=0)
    ahead = [  # also what a killed task has left
        n for n in run.steps("rollouts") if n >= latest and any(run.rollouts(n).glob("*part-*"))
    ]
    for key, (old, new) in changed.items():
        if ahead and key in SAMPLED_BY:
            steps = f"steps {latest} to {ahead[-1]}" if len(ahead) > 1 else f"step {latest}"
            raise InputError(
                f"{run.root}: {key} was {old!r} when step {ahead[-1]} was sampled, and becomes"
                f" {new!r} only between steps; train {steps} first, or remove"
                f" {' and '.join(str(run.rollouts(n)) for n in ahead)}"
            )
        trained = bool(run.steps("policy")) and key.startswith(("lora.", "model.path"))
        if trained or (run.problems.exists() and key.startswith("problems.")):
            raise InputError(
                f"{run.root}: {key} was {old!r} and cannot become {new!r} in this run; start"
                " another run directory"
            )
    if not run.problems.exists():
        if not recipe.problems.path:
            raise InputError(
                f"{run.problems}: no problems yet; set problems.path in the recipe, or run:"
                f" exgrpo problems FILE --out {run.problems}"
            )
        import_into(run.problems, Path(recipe.problems.path), recipe, recipe.model.path, log)
    local = Path(recipe.model.path).is_dir()  # a hub's config would have to be fetched
    limit = positions(recipe.model.path, recipe.model.trust_remote_code) if local else None
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if limit is not None and limit < longest:
        log(
            f"{recipe.model.path}: has {limit} positions, and rollout.max_prompt_tokens +"
            f" rollout.max_new_tokens is {longest}; responses will be cut off there"
        )
    for key, (old, new) in changed.items():
        log(f"recipe: {key} was {old!r}, is now {new!r}")
    for path in (recipe.model.path, recipe.objective.reference):
        keep_policy(path)
    tables.write_text(run.recipe, to_toml(recipe))
    record_provenance(run, recipe)
    return recipe


def check_engines(run: RunDir, recipe: Recipe) -> None:
    """Refuse what cannot sample before the recipe says so: a policy that is gone, a server that is
    not there or serves another policy, more processes than there are GPUs."""
    from exgrpo_cli.engines import open_engine
    from exgrpo_cli.engines.parallel import engine_environments
    from exgrpo_cli.machine import process_environments
    from exgrpo_cli.models import check_policy

    _check_lag(run, recipe)
    if recipe.rollout.engine == "server":
        check_policy(recipe.model.path)
        latest = max(run.steps("policy"), default=0)
        planned = max(run.steps("plan"), default=0)
        sampling = min(planned - Step.of(run, planned).lagged(recipe.loop.lag).lag, latest)
        open_engine(recipe, run.policy_path(sampling, recipe.model.path)).close()
    if engine_count(recipe) > 1:
        engine_environments(recipe)
    if recipe.score.enabled and recipe.score.processes > 1:
        process_environments(recipe.score.processes)


def _check_lag(run: RunDir, recipe: Recipe) -> None:
    """Refuse a lag by which steps that are still to be curated need policies that are gone: those
    of a smaller lag, the last ones, are kept."""
    latest, lag = max(run.steps("policy"), default=0), recipe.loop.lag
    for number in reversed(range(latest, latest + lag)):
        policy = number - Step.of(run, number).lagged(lag).lag
        there = policy == 0 or (run.policy(policy).is_dir() and not run.is_removed(policy))
        if not there and not run.plan(number + 1).exists():
            raise InputError(
                f"{run.root}: loop.lag = {lag}: step {number} is to be sampled by policy {policy},"
                f" which was removed; the largest lag that works now is {latest - 1 - policy}; for"
                f" a larger one, set train.keep_policies = {lag + 1} and train on first"
            )


def import_into(
    out: Path | None,
    source: Path,
    recipe: Recipe,
    policy: str | None,
    log: Log,
    *,
    name: str | None = None,
    dedupe: bool = True,
    held_out: bool = False,
    made: Callable[[], Sequence[Problem]] | None = None,
    without: Path | None = None,
) -> dict[str, Any]:
    """Import a problem set, leaving out prompts that are too long for the policy.

    Args:
        out: where the ``problems`` table goes; None only checks.
        source: a file or folder in any known format.
        recipe: ``problems`` and ``rollout.max_prompt_tokens``.
        policy: whose tokenizer counts; None keeps every length.
        name: the set's name, where rows have none.
        dedupe: whether a question that stands several times enters once.
        held_out: whether it is for evaluation: of ``problems`` only the verifier counts, the rest
            is of the training set.
        made: makes the problems, which ``source`` then only names.
        without: a problems table whose questions are left out.

    Returns:
        The importer's report, with ``too_long`` and ``problems`` (how many were kept).
    """
    from exgrpo_cli.problems import import_problems

    if out is not None:
        _check_target(out, source)
    settings = recipe.problems
    training = settings if not held_out else ProblemSettings(verifier=settings.verifier)
    imported = import_problems(
        source,
        training.format,
        training.verifier,
        name,
        training.limit,
        dedupe,
        log,
        columns={str(name): column for name, column in training.columns.items()},
        skip_bad=training.skip_bad,
        made=made,
        without=without,
    )
    problems, report = imported.frame, dict(imported.report)
    if policy is not None:
        from exgrpo_cli.models import load_tokenizer
        from exgrpo_cli.problems.prompts import render_prompt

        tokenizer = load_tokenizer(policy, recipe.model)
        limit = recipe.rollout.max_prompt_tokens
        fits = [len(render_prompt(p, tokenizer, recipe.model)) <= limit for p in problems["prompt"]]
        report["too_long"] = fits.count(False)
        if report["too_long"]:
            log(f"{source}: {report['too_long']} prompts of more than {limit} tokens left out")
            problems = problems.filter(fits)
    if problems.is_empty():
        raise InputError(f"{source}: no problem is left; see rollout.max_prompt_tokens")
    report["problems"] = problems.height
    if out is not None:
        tables.write_table("problems", problems, out)
        report["out"] = str(out)
    return report


def _check_target(out: Path, source: Path) -> None:
    """Refuse to write a problems table where it would surprise."""
    if out.suffix != ".parquet" or out.is_dir():
        raise InputError(f"{out}: a problems table is a .parquet file; give --out NAME.parquet")
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"{out}: is the source itself; give another --out")


def adopt(step: Step) -> None:
    """Take loose files into a run's log as a step, so that they can be curated.

    The log is what the experience is derived from, so the files are linked into it (or copied, on
    another file system). A step without a plan gets the one that its rollouts tell of.

    Args:
        step: of a run directory (made when it is not there), with ``rollouts`` and ``verdicts``
            and perhaps ``scores`` given, and ``problems`` where the run has none yet.
    """
    import polars as pl

    run, number, rollouts, verdicts = step.run, step.number, step.rollouts, step.verdicts
    if run is None:
        raise InputError("give a run directory")
    counted = tables.read_table("rollouts", rollouts, ["step", "problem_id", "role"])
    for other in counted["step"].unique():
        if other != number:
            raise InputError(f"{rollouts}: rollouts of step {other}; give --step {other}")
    ids = set(tables.read_table("rollouts", rollouts, ["rollout_id"])["rollout_id"])
    judged = set(tables.read_table("verdicts", verdicts, ["rollout_id"])["rollout_id"])
    if ids - judged:
        raise InputError(
            f"{verdicts}: {len(ids - judged)} rollouts of {rollouts} have no verdict here (the"
            f" first is {min(ids - judged)})"
        )
    if "problems" not in step.given and not run.problems.exists():
        raise InputError(f"{run.problems}: the run has no problems yet; give --problems")
    for kind in ("rollouts", "verdicts", "scores"):
        if kind in step.given:
            source, folder = step.given[kind], getattr(run, kind)(number)
            files = tables.parquet_files(source)
            single = len(files) == 1 and not source.is_dir()
            for file in files:
                tables.link_file(file, folder / (tables.part_name(0, 1) if single else file.name))
    if "problems" in step.given:
        tables.link_file(step.problems, run.problems)
    if not run.plan(number).exists():
        plan = (
            counted.group_by("step", "problem_id", "role", maintain_order=True)
            .agg(samples=pl.len().cast(pl.Int32))
            .with_columns(
                successes=pl.lit(None, dtype=pl.Int32), attempts=pl.lit(None, dtype=pl.Int32)
            )
        )
        tables.write_table("plan", plan, run.plan(number))
