"""What of a run is done, missing or being made, and what comes next: the only place."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, load_recipe
from exgrpo_cli.rundir import RunDir

ARRAYS = {"rollout": "rollouts", "verify": "verdicts", "score": "scores"}
_YOUNG = 600.0  # seconds; a temporary file that was not touched for longer is a killed task's
_PART = re.compile(r"(part|replay)-(\d+)-of-\d+\.parquet")
_UNFINISHED = re.compile(rf"\.{_PART.pattern}\..*\.(tmp|parts|rows)")


@dataclass
class _Folder:
    """What lies in the folder of a step's parts."""

    files: dict[str, list[Path]] = field(default_factory=lambda: {"part": [], "replay": []})
    loose: int = 0
    """Tables that are not named as parts; each is whole."""
    unfinished: dict[str, dict[int, float]] = field(
        default_factory=lambda: {"part": {}, "replay": {}}
    )
    """Parts that have temporary files, and when the youngest of them was touched."""
    newest: float | None = None
    """When the last part was written, seconds since the epoch."""
    damaged: list[Path] = field(default_factory=list)

    def division(self, prefix: str) -> tuple[int | None, set[int]]:
        """In how many parts of a kind the step is cut (None: there is none), and which are here."""
        found = tables.divisions(self.files[prefix])
        return (max(found), found[max(found)]) if found else (None, set())


def _look(folder: Path, *, check: bool) -> _Folder:
    """Read a folder's names; with ``check`` also whether each part ends as Parquet does."""
    found = _Folder()
    if not folder.is_dir():
        return found
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                changed = entry.stat().st_mtime
            except FileNotFoundError:  # a temporary file that was renamed meanwhile
                continue
            if entry.name.startswith("."):
                match = _UNFINISHED.fullmatch(entry.name)
                if match:
                    at = found.unfinished[match[1]]
                    at[int(match[2])] = max(at.get(int(match[2]), 0.0), changed)
                continue
            if not entry.name.endswith(".parquet"):
                continue
            match = _PART.fullmatch(entry.name)
            if match:
                found.files[match[1]].append(Path(entry.path))
            else:
                found.loose += 1
            found.newest = max(found.newest or 0.0, changed)
            if check and not _ends_as_parquet(Path(entry.path)):
                found.damaged.append(Path(entry.path))
    return found


def _ends_as_parquet(path: Path) -> bool:
    with path.open("rb") as handle:
        handle.seek(0, os.SEEK_END)
        if handle.tell() < 12:
            return False
        handle.seek(-4, os.SEEK_END)
        return handle.read() == b"PAR1"


def _parts(found: _Folder, prefix: str, expected: int | None) -> dict[str, Any]:
    """Counts of one kind of parts; ``expected`` (None: unknown) gives way to what names say."""
    count, have = found.division(prefix)
    total = expected if count is None else count
    missing = sorted(set(range(total or 0)) - have)
    touched = found.unfinished[prefix]
    writing = sorted(number for number, at in touched.items() if time.time() - at < _YOUNG)
    return {
        "done": len(have),
        "expected": total,
        "missing": missing,
        "writing": writing,
        "left": sorted(touched.keys() - have - set(writing)),
    }


def _plan_of(run: RunDir, step: int, faults: list[str]) -> dict[str, int] | None:
    """How many questions a step's plan has, by role; None where there is no readable plan."""
    path = run.plan(step)
    if not path.exists():
        return None
    try:
        roles = tables.read_table("plan", path, ["role"])["role"].to_list()
    except InputError as error:
        mend = f"curate {run.root} --step {step - 1}" if step else f"rollout {run.root} --step 0"
        faults.append(f"{error}; remove it, then run: exgrpo {mend}")
        return None
    fresh = roles.count("fresh")
    return {"questions": len(roles), "fresh": fresh, "replay": len(roles) - fresh}


def _expected_candidates(run: RunDir, step: int, plan: Mapping[str, int] | None) -> int | None:
    """How many parts the scores of a step's replay candidates will have; None where unknown."""
    if not plan or not plan["replay"]:
        return 0
    curation = _curation(run)
    if not run.experience.exists() or curation.get("last_step") != step - 1:
        return None
    from exgrpo_cli.experience.choose import replay_candidates
    from exgrpo_cli.stages.score import CANDIDATES_PER_PART

    try:
        count = replay_candidates(run, step).height
    except InputError:  # score says it better
        return None
    return len(tables.chunked(count, CANDIDATES_PER_PART)) if count else 0


def _curation(run: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(run.curation.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_step(run: RunDir, step: int, recipe: Recipe, *, deep: bool = True) -> dict[str, Any]:
    """What of one step is there.

    Args:
        recipe: ``rollout.questions_per_part`` and ``score.enabled``.
        deep: also read the plan, and look at the end of each part; without it names alone speak.

    Returns:
        ``step``; ``plan`` (``questions``, ``fresh`` and ``replay``, or None); ``stages``: for
        ``rollout``, ``verify`` and ``score`` the counts ``done`` and ``expected`` (None where it is
        not known yet) of their parts and the numbers of those that are ``missing``, that a task is
        ``writing`` (they have a young temporary file) and that a killed one has ``left``
        unfinished, ``ready``, those of the missing that can be made now (what they are made from
        is there), and ``newest_seconds``, the age of the last part; for ``score`` also ``replay``,
        the same of the replay candidates, and where the step takes in trajectories of others, for
        ``verify`` and ``score`` ``imports``, the same of their files; for all of them and for
        ``curate`` and ``train`` whether it is ``complete``; ``faults``: lines about what must be
        mended by hand.
    """
    faults: list[str] = []
    plan = _plan_of(run, step, faults) if deep else None
    expected = None
    if plan is not None:
        groups = tables.chunked(plan["questions"], recipe.rollout.questions_per_part)
        expected = len(groups) if plan["questions"] else 0
    stages: dict[str, dict[str, Any]] = {}
    found = {stage: _look(getattr(run, kind)(step), check=deep) for stage, kind in ARRAYS.items()}
    division, sampled = found["rollout"].division("part")
    if division is not None:  # verdicts and scores are cut as the rollouts are
        planned, expected = expected, division
        if planned is not None and planned != expected:
            faults.append(
                f"{run.rollouts(step)}: sampled in {expected} parts, and the recipe now gives"
                f" {planned}; restore rollout.questions_per_part, or remove this folder"
            )
    elif found["rollout"].loose:
        expected = 0
    elif expected is None:  # no plan was read: verdicts or scores may still tell
        expected = max(f.division("part")[0] or 0 for f in found.values()) or None
    for stage, folder in found.items():
        part = _parts(folder, "part", expected)
        complete = part["expected"] is not None and not part["missing"]
        if part["expected"] == 0:
            complete = folder.loose > 0 or bool(plan and not plan["questions"])
        if stage != "rollout" and found["rollout"].loose:
            complete = complete and folder.loose >= found["rollout"].loose
        entry: dict[str, Any] = {
            **part,
            "complete": complete,
            "newest_seconds": (
                None if folder.newest is None else round(max(time.time() - folder.newest, 0.0), 1)
            ),
        }
        for prefix, files in folder.files.items():
            divisions = tables.divisions(files)
            if len(divisions) > 1:
                faults.append(
                    f"{getattr(run, ARRAYS[stage])(step)}: {prefix} parts of"
                    f" {' and of '.join(map(str, sorted(divisions)))} lie together; remove the"
                    " stale ones"
                )
        faults += [f"{path}: damaged (no Parquet); remove it" for path in folder.damaged]
        stages[stage] = entry
    imports = run.imports(step)
    for stage in ("verify", "score") if imports else ():
        made = run.imported(ARRAYS[stage], step)
        gaps = [i for i, file in enumerate(imports) if not (made / file.name).exists()]
        stages[stage]["imports"] = {
            "done": len(imports) - len(gaps), "expected": len(imports), "missing": gaps,
        }  # fmt: skip
        stages[stage]["complete"] = stages[stage]["complete"] and not gaps
    for stage, entry in stages.items():
        missing = entry["missing"]
        can = set(missing) if plan is not None else set()  # a rollout needs its plan alone
        entry["ready"] = [n for n in missing if n in (can if stage == "rollout" else sampled)]
    _add_later_stages(run, step, recipe, plan, found["score"], stages, deep=deep)
    return {"step": step, "plan": plan, "stages": stages, "faults": faults}


def _add_later_stages(
    run: RunDir,
    step: int,
    recipe: Recipe,
    plan: Mapping[str, int] | None,
    scores: _Folder,
    stages: dict[str, dict[str, Any]],
    *,
    deep: bool,
) -> None:
    """Whether the step is curated and trained, and the scores of its replay candidates."""
    trained = run.policy(step + 1).is_dir()
    curated = run.curated(step).exists() and run.plan(step + 1).exists()
    score = stages["score"]
    score["enabled"] = recipe.score.enabled
    wanted: int | None = 0
    if deep and recipe.score.enabled and not (curated or trained or scores.files["replay"]):
        wanted = _expected_candidates(run, step, plan)
    score["replay"] = _parts(scores, "replay", wanted)
    score["complete"] = score["complete"] and not score["replay"]["missing"]
    if not recipe.score.enabled and not score["done"]:
        score |= {"complete": True, "missing": [], "ready": []}
    stages["curate"] = {"complete": curated}
    stages["train"] = {"complete": trained}


def due_stage(found: Mapping[str, Any]) -> str | None:
    """The first stage of a described step that is not complete; None when all are."""
    stages = found["stages"]
    return next((name for name in stages if not stages[name]["complete"]), None)


def describe(run: RunDir, step: int | None = None) -> dict[str, Any]:
    """What of a run is done, missing and being made, and what comes next.

    Args:
        step: the step to look at; by default the one that the newest policy is to sample.

    Returns:
        ``path``; ``steps`` trained and ``steps_planned`` (None without a recipe); ``policy``, the
        newest; ``removed_policies``, their steps; ``origin``, the run and step that it goes on from
        (None for most); ``replay_started_step`` (None before); ``at_work``: whether an ``exgrpo
        run``, ``curate`` or ``train`` holds the run; ``step``: see :func:`describe_step`;
        ``ahead``: the same of the steps after it that a lag lets sample; ``behind``: earlier steps
        with missing parts, ``step`` to the missing numbers by stage;
        ``evaluations``: by set the steps ``done`` and ``missing``; ``faults``: what must be mended
        by hand; ``sbatch``: options for ``GPU`` and ``CPU`` jobs (None where not known);
        ``next``: ``step``, ``stage`` (``init`` before there are problems, ``done`` when all steps
        are trained, ``finished`` when no question is left) and ``command``.
    """
    own = run.own_recipe()
    recipe = load_recipe(own) if own else None
    settings = recipe or Recipe()
    check_is_run(run)
    trained = max(run.steps("policy"), default=0)
    shown = describe_step(run, trained if step is None else step, settings)
    current = shown if shown["step"] == trained else describe_step(run, trained, settings)
    ahead = [
        describe_step(run, n, settings)
        for n in run.steps("plan")
        if step is None and trained < n <= trained + settings.loop.lag
    ]
    faults = list(dict.fromkeys(f for one in (current, shown, *ahead) for f in one["faults"]))
    behind = _behind(run, trained, settings)
    faults += [_lost_rollouts(run, int(n)) for n, gaps in behind.items() if "rollout" in gaps]
    origin, begun = run.origin(), run.first_step()
    lost = _lost_trainer(run, trained)
    if lost and (recipe is None or trained < recipe.loop.steps):
        faults.append(f"{run.trainer(trained)}: {lost[0]}")
    return {
        "path": str(run.root),
        "steps": trained,
        "steps_planned": recipe.loop.steps if recipe else None,
        "policy": str(run.policy(trained)) if trained else settings.model.path,
        "removed_policies": [n for n in run.steps("policy") if n > begun and run.is_removed(n)],
        "origin": origin,
        "replay_started_step": _replay_from(run, trained),
        "at_work": run.is_locked(),
        "step": shown,
        "ahead": ahead,
        "behind": behind,
        "evaluations": _evaluations(run, trained, settings),
        "faults": faults,
        "sbatch": _sbatch_options(run),
        "next": _next(run, current, recipe, behind),
    }


def _lost_rollouts(run: RunDir, step: int) -> str:
    root = shlex.quote(str(run.root))
    again = f"exgrpo rollout {root} --step {step}"
    return (
        f"{run.rollouts(step)}: rollouts of a trained step are gone, and replay reads them; restore"
        f" them, or sample them again: {again} (the same rows where the engine repeats itself, as"
        f" on a CPU), or go back to that step: {again} --force --discard-later"
    )


def _lost_trainer(run: RunDir, trained: int) -> tuple[str, str] | None:
    """What to do about the newest policy's trainer state where it is gone, and the command.

    Training the step before once more makes it, from the state before that; step 0 needs none.
    """
    if trained == 0 or run.trainer(trained).is_dir():
        return None
    words = "the trainer state of the newest policy is gone, and train needs it; restore it"
    command, later = run.training_again(trained)
    how = "train again from the last that is kept" if later else "make it again"
    return f"{words}, or {how}: {command}{later}", command


def _sbatch_options(run: RunDir) -> dict[str, str | None]:
    """What sbatch is told by ``GPU_OPTIONS`` and ``CPU_OPTIONS``: set now, or at the last submit.

    ``submit.sh`` leaves them in ``RUN/slurm/options``; None where neither has them.
    """
    try:
        text = (run.root / "slurm" / "options").read_text(encoding="utf-8")
    except OSError:
        text = ""
    kept = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {
        kind: os.environ.get(f"{kind}_OPTIONS") or kept.get(f"{kind}_OPTIONS") or None
        for kind in ("GPU", "CPU")
    }


def check_is_run(run: RunDir) -> None:
    """An empty folder may become a run; one with other things, such as runs, is a wrong path."""
    names = {entry.name for entry in run.root.iterdir() if not entry.name.startswith(".")}
    known = {"recipe.toml", "problems.parquet", "metrics.jsonl", "plan", "rollouts", "policy"}
    if names and not names & known:
        raise InputError(
            f"{run.root}: not a run directory (neither recipe.toml nor problems.parquet nor"
            " rollouts in it)"
        )


def _next(
    run: RunDir,
    current: Mapping[str, Any],
    recipe: Recipe | None,
    behind: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    root, step = shlex.quote(str(run.root)), current["step"]
    if recipe is not None and step >= recipe.loop.steps:
        missing = [
            name for name, e in _evaluations(run, step, recipe).items() if step in e["missing"]
        ]
        command = f"exgrpo evaluate {root} --step {step}" if missing else f"exgrpo report {root}"
        return {"step": step, "stage": "done", "command": command}
    plan = current["plan"]
    if plan is not None and not plan["questions"]:
        return {"step": step, "stage": "finished", "command": f"exgrpo report {root}"}
    if not run.problems.exists() and not run.rollouts(step).is_dir():
        return {"step": 0, "stage": "init", "command": _init(root, recipe)}
    if step > 0 and plan is None and not run.rollouts(step).is_dir():
        # The step before was trained, but its curation has not come to its end.
        command = f"exgrpo curate {root} --step {step - 1}"
        return {"step": step - 1, "stage": "curate", "command": command}
    stage = due_stage(current) or "train"
    for before, gaps in behind.items():
        for earlier in ("rollout", "verify"):
            if stage == "curate" and earlier in gaps:  # which reads the whole log
                step, stage = int(before), earlier
    lost = _lost_trainer(run, step) if stage == "train" else None
    if lost:
        return {"step": step, "stage": stage, "command": lost[1]}
    return {"step": step, "stage": stage, "command": f"exgrpo {stage} {root} --step {step}"}


def _init(root: str, recipe: Recipe | None) -> str:
    if recipe is None:
        return f"exgrpo init {root} --recipe RECIPE.toml"
    return f"exgrpo init {root}" + ("" if recipe.problems.path else " --problems FILE")


def _replay_from(run: RunDir, trained: int) -> int | None:
    """The first step with replay, as curation has it, where it has come to that."""
    start = _curation(run).get("replay_from")
    return start if isinstance(start, int) and start <= trained else None


def _behind(run: RunDir, before: int, recipe: Recipe) -> dict[str, dict[str, list[int]]]:
    """Earlier steps whose log has gaps: a rebuild of the experience would need them."""
    found = {}
    for step in sorted({*run.steps("rollouts"), *run.steps("verdicts"), *run.steps("plan")}):
        if step < before:
            thrown_away = not run.rollouts(step).is_dir()  # then the plan tells how many
            stages = describe_step(run, step, recipe, deep=thrown_away)["stages"]
            gaps = {name: stages[name]["missing"] for name in ARRAYS if stages[name]["missing"]}
            if gaps.get("score") and not stages["score"]["done"]:
                del gaps["score"]  # it was left out in that step
            if gaps:
                found[str(step)] = gaps
    return found


def _evaluations(run: RunDir, trained: int, recipe: Recipe) -> dict[str, dict[str, list[int]]]:
    """The recipe's evaluations that are there, and those that are due and are not."""
    due = [s for s in range(trained + 1) if recipe.evaluates(s)]
    found = {}
    for name in recipe.evaluate.problems:
        done = [
            s
            for s in sorted({*due, *run.steps("evaluations")})
            if (run.evaluation(s, name) / "summary.json").exists()
        ]
        missing = [s for s in due if s not in done and not run.is_removed(s)]
        found[name] = {"done": done, "missing": missing}
    return found
