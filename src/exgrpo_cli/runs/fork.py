"""``exgrpo run RUN --from OTHER --step N``: a run that goes on from a step of another one.

It has the other's history up to the step, its policy and its optimizer state, as hard links, which
take no room and which neither run can change: files are only ever replaced. From there on it is
what the other would have become under its recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.history import StepFiles, history_digests
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, load_recipe
from exgrpo_cli.retention import KEEP
from exgrpo_cli.rundir import REMOVED, RunDir, step_name, why_removed
from exgrpo_cli.runs.prepare import prepare
from exgrpo_cli.tables import atomic_folder, link_file, write_json, write_text


def fork(
    run: RunDir,
    other: RunDir,
    step: int,
    recipe: Recipe,
    *,
    fresh_optimizer: bool = False,
    log: Log = quiet,
) -> Recipe:
    """Make a run that goes on from a step of another; one that was made so before is left as it is.

    It appears as a whole. The experience is derived from the linked history by the new recipe's
    rules. Policies of earlier steps stay with the other run; in their places it is said where.

    Args:
        run: the new run; not there yet, or made by the same call.
        other: whose step.
        step: N, of the policy that the new run begins with: its first step is N.
        recipe: of the new run; where it names no model or no problems they are the other's.
        fresh_optimizer: leave the optimizer's state behind.

    Returns:
        The recipe, whole.

    Raises:
        InputError: the other run has not got that step, or its policy or optimizer state is gone;
            the new run is another one; a recipe that the history does not allow, see
            :func:`exgrpo_cli.runs.prepare.prepare`.
    """
    own = other.own_recipe()
    recipe = _completed(recipe, load_recipe(own)) if own else recipe
    origin = {"run": str(other.root.resolve()), "step": step, "fresh_optimizer": fresh_optimizer}
    if _is_there(run, origin):
        return recipe
    _check(other, step, fresh_optimizer)
    with atomic_folder(run.root) as folder:
        made = RunDir(folder)
        linked = True
        for source, name in _files(other, step, trainer=not fresh_optimizer):
            linked &= link_file(source, folder / name)
        for number in range(1, step):
            where = f"lies in {other.root.resolve()}, from which this run goes on"
            write_text(made.policy(number) / REMOVED, f"{where}\n")
        if step and fresh_optimizer:
            _write_fresh(other, made, step)
        write_json(made.origin_file, origin)
        try:
            recipe = prepare(made, recipe, log)
            if step:
                digests = history_digests(made, step - 1)
                with Experience.open(made, recipe) as experience:
                    experience.derive(step - 1)
                    experience.write(digests)
        except InputError as error:
            raise InputError(str(error).replace(str(folder), str(run.root))) from error
    how = "linked" if linked else "copied, since it lies on another file system"
    log(f"{run.root}: goes on from step {step} of {other.root}, whose history is {how}")
    return recipe


def _completed(recipe: Recipe, other: Recipe) -> Recipe:
    """The recipe with the other's model and problems where it names none."""
    found: dict[str, Any] = {}
    if not recipe.model.path:
        found["model"] = recipe.model.model_copy(update={"path": other.model.path})
    if not recipe.problems.path:
        found["problems"] = other.problems
    return recipe.model_copy(update=found)


def _is_there(run: RunDir, origin: dict[str, Any]) -> bool:
    """Whether the run was made from the same origin before."""
    if not run.root.exists() or (run.root.is_dir() and not any(run.root.iterdir())):
        return False
    found = run.origin()
    if found == origin:
        return True
    what = f"goes on from step {found['step']} of {found['run']}" if found else "is no fork"
    fresh = " without its optimizer state" * bool(found and found["fresh_optimizer"])
    raise InputError(
        f"{run.root}: is there already, and {what}{fresh}; give another folder, or leave --from"
        " out to go on with it"
    )


def _check(other: RunDir, step: int, fresh_optimizer: bool) -> None:
    """Refuse a step from which nothing can go on."""
    newest = max(other.steps("policy"), default=0)
    if step > newest:
        raise InputError(f"{other.root}: has no policy of step {step}; the newest is of {newest}")
    whole = other.restarts(newest)
    nearest = f"whole are those of steps {', '.join(map(str, whole))}"
    policy = other.policy(step)
    if step and not policy.is_dir():
        raise InputError(f"{policy}: no such policy; {nearest}")
    if why := why_removed(policy):
        raise InputError(f"{policy}: {why}; {nearest}")
    if not fresh_optimizer and step not in whole:
        raise InputError(
            f"{other.trainer(step)}: the optimizer's state of step {step} is not there; go on"
            f" without it, by --fresh-optimizer, or from another step: {nearest}"
        )
    for number in range(step):
        StepFiles.of(other, number)
    if step and not other.plan(step).exists():
        raise InputError(
            f"{other.plan(step)}: missing; run: exgrpo curate {other.root} --step {step - 1}"
        )


def _files(other: RunDir, step: int, *, trainer: bool) -> list[tuple[Path, Path]]:
    """The files that the new run begins with, and their names in it."""
    root = other.root
    earlier, ours = [step_name(number) for number in range(step)], step_name(step)
    found = [other.recipe, other.problems, *(root / "evaluations").glob("*.parquet")]
    found += [root / "curated" / f"{name}.parquet" for name in earlier]
    found += [root / "plan" / f"{name}.parquet" for name in (*earlier, ours)]
    found += (root / "metrics" / ours).glob("evaluate-*.json")
    kinds = ("rollouts", "verdicts", "scores", "metrics", "evaluations")
    folders = [root / kind / name for kind in kinds for name in earlier]
    folders += [other.imported(kind, n) for kind in kinds[:3] for n in range(step + 1)]
    folders += [other.policy(step), root / "evaluations" / ours]
    folders += [other.trainer(step)] if trainer else []
    for folder in folders:
        found += [file for file in folder.rglob("*") if file.is_file() and file.name != KEEP]
    names = [(file, file.relative_to(root)) for file in found if file.exists()]
    return [one for one in names if not any(part.startswith(".") for part in one[1].parts)]


def _write_fresh(other: RunDir, made: RunDir, step: int) -> None:
    from exgrpo_cli.training.trainer_state import fresh_state, read_trainer

    before = other.trainer(step)
    notes = read_trainer(before).get("notes", {}) if before.is_dir() else {}
    write_json(made.trainer(step) / "trainer.json", fresh_state(step, notes))
