"""The mixed batch of a step: fresh groups, and replay groups with their replayed trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe

if TYPE_CHECKING:
    import polars as pl
    import torch

    from exgrpo_cli.training.update import Group, Row, Terms


Paths = Path | Sequence[Path]
"""A file, a folder of parts, or several of either."""


def with_reference(
    groups: list[Group], terms: Terms, recipe: Recipe, device: torch.device, log: Log
) -> list[Group]:
    """Every row with its log-probabilities under the reference policy."""
    from exgrpo_cli.models import load_model, resolve_dtype
    from exgrpo_cli.training.logprobs import score_sequences
    from exgrpo_cli.training.update import autocast

    path = recipe.objective.reference or recipe.model.path
    if not path:
        raise InputError("objective.kl needs a reference: set objective.reference or model.path")
    log(f"scoring the batch under the reference policy {path}")
    model = load_model(path, recipe.model, device, resolve_dtype(recipe.model.dtype, device))
    rows = [row for group in groups for row in group]
    with autocast(device, recipe.train.autocast):
        scored = score_sequences(
            model,
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            terms.temperature,
            recipe.train.tokens_per_microbatch,
        )
    found = iter(scored)
    return [[replace(row, reference=next(found)[0]) for row in group] for group in groups]


def _named(paths: Paths) -> str:
    return str(paths) if isinstance(paths, Path) else ", ".join(str(path) for path in paths)


def read_groups(
    rollouts: Paths,
    verdicts: Paths,
    scores: Paths | None,
    curated: Paths | None,
    step: int,
    recipe: Recipe,
) -> list[Group]:
    """The mixed batch: groups in an order that does not depend on parts, advantages set."""
    import torch

    from exgrpo_cli.training.objective import group_advantages
    from exgrpo_cli.training.update import Row

    silent = recipe.objective.truncated == "zero_advantage"
    fresh = _read_rollouts(rollouts, step, ["finish_reason"] if silent else [])
    cut = fresh.filter(fresh["finish_reason"] == "length")["rollout_id"].to_list() if silent else []
    truncated = set(cut)
    rewards = _read_rewards(verdicts, fresh["rollout_id"].to_list(), rollouts)
    old = {} if scores is None else _read_scores(scores, fresh, step, rollouts)
    past = [] if curated is None else _read_curated(curated, step)

    members: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row in fresh.sort("problem_id", "role", "sample").iter_rows(named=True):
        logprobs = old.get(row["rollout_id"])
        member = Row(
            rollout_id=row["rollout_id"],
            prompt_ids=row["prompt_ids"],
            token_ids=row["token_ids"],
            advantage=0.0,
            replayed=False,
            old=None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32),
            sampler=torch.tensor(row["logprobs"], dtype=torch.float32),
        )
        group = members.setdefault((row["problem_id"], row["role"]), [])
        group.append((member, rewards[row["rollout_id"]]))
    for row in past:
        key = (row["problem_id"], "replay")
        if key not in members and recipe.rollout.samples > 1:
            assert curated is not None
            raise InputError(
                f"{_named(curated)}: question {row['problem_id']} has a curated trajectory but no"
                f" replay rollouts in {_named(rollouts)}; they are of different plans"
            )
        member = Row(
            rollout_id=row["rollout_id"],
            prompt_ids=row["prompt_ids"],
            token_ids=row["token_ids"],
            advantage=0.0,
            replayed=True,
            old=torch.tensor(row["logprobs"], dtype=torch.float32),
        )
        members.setdefault(key, []).insert(0, (member, row["reward"]))

    ordered = [members[key] for key in sorted(members)]
    values = torch.tensor([r for group in ordered for _, r in group], dtype=torch.float64)
    index = torch.tensor([i for i, group in enumerate(ordered) for _ in group])
    advantages = iter(group_advantages(values, index, recipe.objective.divide_by_std).tolist())
    groups = [[replace(row, advantage=next(advantages)) for row, _ in group] for group in ordered]
    return [
        [
            replace(row, advantage=0.0) if row.rollout_id in truncated and not row.replayed else row
            for row in group
        ]
        for group in groups
    ]


def _read_rollouts(paths: Paths, step: int, also: Sequence[str] = ()) -> pl.DataFrame:
    columns = [
        "rollout_id", "step", "problem_id", "sample", "role", "policy", "prompt_ids", "token_ids",
        "logprobs", *also,
    ]  # fmt: skip
    data = tables.read_table("rollouts", paths, columns)
    name = _named(paths)
    if data.is_empty():
        raise InputError(f"{name}: no rollouts; there is nothing to train on")
    _refuse_repeats(data, ["rollout_id"], name)
    _refuse_other_steps(data, step, name)
    policies = data["policy"].unique().sort().to_list()
    if len(policies) > 1:
        raise InputError(
            f"{name}: rollouts of the policies {policies[0]} and {policies[1]} lie together"
        )
    return data


def _read_rewards(paths: Paths, ids: list[str], rollouts: Paths) -> dict[str, float]:
    data = tables.read_table("verdicts", paths, ["rollout_id", "reward"])
    name = _named(paths)
    _refuse_repeats(data, ["rollout_id"], name)
    rewards = dict(zip(data["rollout_id"].to_list(), data["reward"].to_list(), strict=True))
    known = set(ids)
    for rollout_id in ids:
        if rollout_id not in rewards:
            raise InputError(
                f"{name}: no verdict on rollout {rollout_id} of {_named(rollouts)}; run verify"
            )
    for rollout_id, reward in rewards.items():
        if rollout_id not in known:
            raise InputError(
                f"{name}: a verdict on rollout {rollout_id}, which is not in {_named(rollouts)};"
                " they are of different steps or runs"
            )
        if not math.isfinite(reward):
            raise InputError(f"{name}: the reward of rollout {rollout_id} is {reward}")
    return rewards


def _read_scores(
    paths: Paths, rollouts: pl.DataFrame, step: int, rollouts_path: Paths
) -> dict[str, list[float]]:
    """Log-probabilities of the rollouts under the policy that sampled them, by rollout."""
    roots = [paths] if isinstance(paths, Path) else list(paths)
    files = [file for root in roots for file in tables.parquet_files(root)]
    files = [file for file in files if not file.name.startswith("replay-")]
    data = tables.read_table("scores", files, ["rollout_id", "policy", "step", "logprobs"])
    name = _named(paths)
    data = data.filter(data["rollout_id"].is_in(rollouts["rollout_id"].to_list()))
    _refuse_repeats(data, ["rollout_id", "policy"], name)
    own = data.filter(data["policy"] == rollouts["policy"][0])
    found = dict(zip(own["rollout_id"].to_list(), own["logprobs"].to_list(), strict=True))
    for rollout_id, token_ids in rollouts.select("rollout_id", "token_ids").iter_rows():
        if rollout_id not in found:
            raise InputError(
                f"{name}: no score of rollout {rollout_id} under its policy"
                f" {rollouts['policy'][0]}; run score for step {step}, or train without scores"
            )
        if len(found[rollout_id]) != len(token_ids):
            raise InputError(
                f"{name}: rollout {rollout_id} has {len(found[rollout_id])} logprobs, but"
                f" {len(token_ids)} tokens in {_named(rollouts_path)}; run score again"
            )
    return found


def _read_curated(paths: Paths, step: int) -> list[dict[str, Any]]:
    columns = ["step", "problem_id", "rollout_id", "prompt_ids", "token_ids", "logprobs", "reward"]
    data = tables.read_table("curated", paths, columns)
    _refuse_other_steps(data, step, _named(paths))
    _refuse_repeats(data, ["problem_id"], _named(paths))
    return data.sort("problem_id").to_dicts()


def _refuse_repeats(data: pl.DataFrame, columns: list[str], name: str) -> None:
    repeated = data.filter(data.select(columns).is_duplicated())
    if not repeated.is_empty():
        raise InputError(
            f"{name}: {columns[0]} {repeated[columns[0]][0]} is there more than once; are parts of"
            " two divisions lying together?"
        )


def _refuse_other_steps(data: pl.DataFrame, step: int, name: str) -> None:
    other = data.filter(data["step"] != step)
    if not other.is_empty():
        raise InputError(
            f"{name}: rollout {other['rollout_id'][0]} is of step {other['step'][0]}, not of step"
            f" {step}"
        )
