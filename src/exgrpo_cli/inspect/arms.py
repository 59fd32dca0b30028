"""Runs as the arms of an experiment: those that differ in their seeds alone are one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.inspect.charts import Point
from exgrpo_cli.metrics import Metrics, spent
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe, differences, load_recipe, setting
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.provenance import read_provenance

ALIKE = frozenset(
    {
        "seed", "loop.track", "rollout.url", "rollout.questions_per_part", "rollout.batch_size",
        "rollout.device", "rollout.gpu_memory_utilization", "rollout.tensor_parallel",
        "rollout.processes", "verify.workers", "verify.memory_mb", "score.tokens_per_batch",
        "score.device", "score.processes", "train.tokens_per_microbatch",
        "train.gradient_checkpointing", "train.processes", "train.device", "train.keep",
        "train.keep_policies", "train.keep_every",
        "evaluate.problems", "evaluate.samples", "evaluate.samples_by_source", "evaluate.every",
        "evaluate.bootstrap",
    }
)  # fmt: skip
"""Settings that say where and how fast a run works, and how often it is looked at: runs of one arm
may differ in them. So they may in ``loop.steps``, where no schedule of the learning rate counts on
it."""

_HISTORY = ("from", "imports")
"""The keys of :attr:`Member.history`."""
_NAMING = 4
"""An arm is named after so many settings at most."""
_DEEP = 4
"""Runs may lie so many folders below one that is given."""


@dataclass(frozen=True)
class Member:
    """A run of an arm."""

    run: RunDir
    recipe: Recipe
    metrics: Metrics

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @cached_property
    def spent(self) -> Mapping[str, list[Point]]:
        return spent(self.metrics)

    @cached_property
    def history(self) -> dict[str, str]:
        """What made the run beside its recipe: the step of another run from which it goes on (that
        run without its seed), and the files of imported trajectories that it took in."""
        found = {}
        if origin := self.run.origin():
            root = Path(origin["run"])
            other = _without_seed(str(root).lstrip("/"), _seed_of(root, self.seed))
            fresh = ", fresh optimizer" * origin["fresh_optimizer"]
            found["from"] = f"step {origin['step']} of /{other}{fresh}"
        taken = sorted((self.run.root / "verdicts").glob("step-*-import/[!.]*.parquet"))
        if taken:
            found["imports"] = " and ".join(f"{file.parent.name}/{file.stem}" for file in taken)
        return found

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the recipe, or of a key of :attr:`history`."""
        return self.history.get(key) if key in _HISTORY else setting(self.recipe, key)


@dataclass(frozen=True)
class Arm:
    """Runs that are repeats of one another."""

    name: str
    members: tuple[Member, ...]

    @property
    def seeds(self) -> list[int]:
        return sorted({member.seed for member in self.members})


def arms(given: Sequence[str], log: Log) -> list[Arm]:
    """The arms of an experiment, in the order of the runs.

    Args:
        given: run directories, folders of them, or either as ``NAME=PATH``: what lies there is an
            arm of this name, whatever the recipes. The others are grouped by their recipes and
            named after the runs, without the seed, or where that names nothing after what differs.
        log: told what is no run, or has no metrics yet, and is left out.
    """
    found: dict[Path, tuple[str, Member]] = {}
    for text in given:
        name, path = _split(text)
        for member in _members(path, log):
            first, _ = found.setdefault(member.run.root.resolve(), (name, member))
            if first != name and member.run.root == path:
                log(f"{text}: given already{f' as {first}' * bool(first)}; left out")
    if not found:
        raise InputError(f"{', '.join(given)}: no run with metrics here")
    groups: list[tuple[str, list[Member]]] = []
    for name, member in found.values():
        for other, members in groups:
            if name == other and (name or not settings_that_differ([members[0], member])):
                members.append(member)
                break
        else:
            groups.append((name, [member]))
    names = _names([members for _, members in groups])
    made = [
        Arm(name or own, tuple(sorted(members, key=lambda member: member.seed)))
        for (name, members), own in zip(groups, names, strict=True)
    ]
    for arm in made:
        if [other.name for other in made].count(arm.name) > 1:
            raise InputError(f"{arm.name}={arm.members[0].run.root}: another arm has this name")
    return made


def settings_that_differ(members: Sequence[Member]) -> list[str]:
    """The dotted keys in which some runs' recipes differ, other than those of :data:`ALIKE`, and
    the keys of their histories that do."""
    first = members[0]
    keys: dict[str, None] = {}
    for member in members[1:]:
        keys |= dict.fromkeys(differences(first.recipe, member.recipe))
    for key in _HISTORY:
        if len(_distinct(member.setting(key) for member in members)) > 1:
            keys[key] = None
    if all(member.recipe.train.schedule == "constant" for member in members):
        keys.pop("loop.steps", None)
    return [key for key in keys if key not in ALIKE]


def differing(arms: Sequence[Arm]) -> dict[str, list[list[Any]]]:
    """What is not the same in all arms: of each key the values of each arm, mostly one.

    Beside the recipes' keys it is what runs go on ``from``, their ``imports``, and the ``commit``
    that they were last started with.
    """
    members = [member for arm in arms for member in arm.members]
    found = {
        key: [_distinct(member.setting(key) for member in arm.members) for arm in arms]
        for key in settings_that_differ(members)
    }
    commits = [_distinct(map(_commit, arm.members)) for arm in arms]
    if len(_distinct(one for some in commits for one in some)) > 1:
        found["commit"] = commits
    return found


def _commit(member: Member) -> str:
    starts = read_provenance(member.run)
    return str((starts[-1].get("commit") if starts else None) or "not known")


def _distinct(values: Iterator[Any] | map[str]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _split(text: str) -> tuple[str, Path]:
    """The name, if any, and the path of ``NAME=PATH``."""
    name, equals, path = text.partition("=")
    if equals and path and not Path(text).exists():
        return name, Path(path)
    return "", Path(text)


def _members(path: Path, log: Log) -> Iterator[Member]:
    if not path.exists():
        raise InputError(f"{path}: no such run directory")
    runs = list(_runs(path, _DEEP)) if path.is_dir() else []
    if not runs:
        log(f"{path}: not a run directory, nor are there any in it; left out")
    for run in runs:
        own = run.own_recipe()
        metrics = run.read_metrics()
        if metrics:
            yield Member(run, Recipe() if own is None else load_recipe(own), metrics)
        else:
            log(f"{run.root}: no metrics yet; left out")


def _runs(folder: Path, deep: int) -> Iterator[RunDir]:
    """The folder, where it is a run; else the runs in it."""
    run = RunDir(folder)
    if run.recipe.exists() or run.metrics.exists():
        yield run
    elif deep:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _runs(child, deep - 1)


def _names(groups: Sequence[Sequence[Member]]) -> list[str]:
    """A name for each group: its runs', without the seed, where they have one in common."""
    roots = [member.run.root.resolve() for group in groups for member in group]
    above = Path(os.path.commonpath([root.parent for root in roots]))
    stems = [
        {_without_seed(m.run.root.resolve().relative_to(above).as_posix(), m.seed) for m in group}
        for group in groups
    ]
    common = [stem.pop() if len(stem) == 1 else "" for stem in stems]
    return [
        name
        if name and common.count(name) == 1
        else _settings_of(group, groups)
        or group[0].run.root.resolve().relative_to(above).as_posix()
        for name, group in zip(common, groups, strict=True)
    ]


def _settings_of(group: Sequence[Member], groups: Sequence[Sequence[Member]]) -> str:
    """What sets a group apart: from the first one, or that one from the others. Empty where that
    is too much for a name."""
    others = [one[0] for one in groups] if group is groups[0] else [groups[0][0]]
    keys = settings_that_differ([group[0], *others])
    words = (f"{key.rpartition('.')[2]} = {group[0].setting(key)}" for key in keys)
    return "" if len(keys) > _NAMING else ", ".join(words) or "all runs"


def _seed_of(root: Path, default: int) -> int:
    """The seed of another run, where it can still be read."""
    try:
        return load_recipe(RunDir(root).recipe).seed
    except InputError:
        return default


def _without_seed(name: str, seed: int) -> str:
    """A run's name without its seed: ``grpo`` of ``grpo-3``, ``grpo_seed3`` or ``seed-3/grpo``."""
    part = rf"(?:^|[-_./])(?:seed|s)?[-_=]?0*{seed}(?=$|[-_./])"
    *_, last = [None, *re.finditer(part, name)]
    return name if last is None else (name[: last.start()] + name[last.end() :]).lstrip("-_./")
