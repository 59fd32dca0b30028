"""The mixed batch of a step: fresh groups, and replay groups with their replayed trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import step_number

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from exgrpo_cli.step import Step


@dataclass(frozen=True)
class Row:
    """One response of the mixed batch."""

    rollout_id: str
    prompt_ids: Sequence[int] | Tensor
    """``[prompt]`` int32."""
    token_ids: Sequence[int] | Tensor
    """``[tokens]`` int32."""
    advantage: float
    replayed: bool
    old: Tensor | None
    """``[tokens]`` float32 on the CPU, nats: log-probabilities under the sampling policy, or those
    recorded with a replayed trajectory; None where the trainer has to compute them."""
    sampler: Tensor | None = None
    """``[tokens]``, as the rollout engine reported them; None for replayed rows."""
    reference: Tensor | None = None
    """``[tokens]`` under the reference policy of the KL term."""

    @property
    def length(self) -> int:
        """Tokens that the model is run on."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


Group = list[Row]
"""The rows of one question in one role; advantages were taken over them together."""


def is_silent(recipe: Recipe, size: int, *, cut: bool, replayed: bool) -> bool:
    """Whether a row's advantage is 0 whatever its reward.

    Args:
        size: rows of its group; a row that is left alone has nothing to be better than.
        cut: whether the response ended at the length limit.
        replayed: whether it is a stored trajectory, which always speaks.
    """
    if replayed:
        return False
    alone = size == 1 and recipe.rollout.samples > 1
    return alone or (cut and recipe.objective.truncated == "zero_advantage")


def list_rows(column: pl.Series) -> list[Tensor]:
    """A column of lists as tensors that share one buffer: no number becomes a Python object."""
    import torch

    sizes = column.list.len().to_list()
    flat = column.filter(column.list.len() > 0).explode()
    values = torch.from_numpy(flat.to_numpy(writable=True))
    return list(torch.split(values, sizes)) if sizes else []


@dataclass(frozen=True)
class Batch:
    """The tables of a training step, each read once, checked, and belonging together."""

    rollouts: pl.DataFrame
    """With ``reward``, in the order of the files."""
    old: pl.DataFrame | None
    """``rollout_id`` and ``logprobs`` under the policy that sampled; None where not scored."""
    curated: pl.DataFrame | None
    """The replayed trajectories, by question; None for none."""
    where: str
    """The rollouts' place, for messages."""
    curated_where: str
    """Likewise the trajectories'."""
    lag: int
    """By how many steps the policy that sampled is older than the one that the step trains."""

    @classmethod
    def read(cls, step: Step) -> Batch:
        """Read a step's ``rollouts``, ``verdicts``, and where there are any ``scores`` and
        ``curated``.
        """
        name = str(step.rollouts)
        rollouts = _read_rollouts(step.rollouts, step.number)
        rewards = _read_rewards(step.verdicts, rollouts, name)
        sampler = step_number(rollouts["policy"][0])
        scores, curated = step.find("scores"), step.find("curated")
        if step.run is not None and "scores" not in step.given and not step.scores.is_dir():
            scores = None
        return cls(
            rollouts.join(rewards, on="rollout_id", how="left", maintain_order="left"),
            None if scores is None else _read_scores(scores, rollouts, step.number, name),
            None if curated is None else _read_curated(curated, step.number),
            name,
            str(curated),
            step.number - (sampler if sampler is not None else step.number),
        )

    def groups(self, recipe: Recipe) -> list[Group]:
        """The groups with their advantages, in an order that does not depend on parts.

        A fresh question's rollouts are a group; a replay question's rollouts and its trajectories
        (first, the best one at the top) are a group whose advantages come from all its rewards
        together.

        Args:
            recipe: ``objective``, and ``rollout.samples``: with one alone there are no rollouts
                beside the replayed trajectory.
        """
        members: dict[tuple[str, str], list[tuple[Row, float]]] = {}
        for row, key, reward in self._fresh():
            members.setdefault(key, []).append((row, reward))
        for row, key, reward in reversed(self._replayed()):
            if key not in members and recipe.rollout.samples > 1:
                raise InputError(
                    f"{self.curated_where}: question {key[0]} has a curated trajectory but no"
                    f" replay rollouts in {self.where}; they are of different plans"
                )
            members.setdefault(key, []).insert(0, (row, reward))
        return self._with_advantages([members[key] for key in sorted(members)], recipe)

    def _fresh(self) -> list[tuple[Row, tuple[str, str], float]]:
        rows = self.rollouts.sort("problem_id", "role", "sample")
        # Without scores the trainer computes those of its own policy, which with a lag is another
        # than the one that sampled.
        known = self.rollouts if self.old is None and self.lag else self.old
        old = {} if known is None else _by_rollout(known)
        return [
            (Row(rollout_id, prompt, tokens, 0.0, False, old.get(rollout_id), sampler), key, reward)
            for rollout_id, prompt, tokens, sampler, key, reward in zip(
                rows["rollout_id"],
                list_rows(rows["prompt_ids"]),
                list_rows(rows["token_ids"]),
                list_rows(rows["logprobs"]),
                zip(rows["problem_id"], rows["role"], strict=True),
                rows["reward"],
                strict=True,
            )
        ]

    def _replayed(self) -> list[tuple[Row, tuple[str, str], float]]:
        if self.curated is None or self.curated.is_empty():
            return []
        rows = self.curated
        return [
            (Row(rollout_id, prompt, tokens, 0.0, True, old), (problem, "replay"), reward)
            for rollout_id, prompt, tokens, old, problem, reward in zip(
                rows["rollout_id"],
                list_rows(rows["prompt_ids"]),
                list_rows(rows["token_ids"]),
                list_rows(rows["logprobs"]),
                rows["problem_id"],
                rows["reward"],
                strict=True,
            )
        ]

    def _with_advantages(
        self, members: list[list[tuple[Row, float]]], recipe: Recipe
    ) -> list[Group]:
        import torch

        from exgrpo_cli.training.objective import group_advantages

        values = torch.tensor([r for group in members for _, r in group], dtype=torch.float64)
        index = torch.tensor([i for i, group in enumerate(members) for _ in group])
        divide = recipe.objective.divide_by_std
        advantages = iter(group_advantages(values, index, divide).tolist())
        cut = set(self.rollouts.filter(self.rollouts["finish_reason"] == "length")["rollout_id"])

        def advantage(row: Row, size: int) -> float:
            value = float(next(advantages))
            is_cut = row.rollout_id in cut
            return 0.0 if is_silent(recipe, size, cut=is_cut, replayed=row.replayed) else value

        return [
            [replace(row, advantage=advantage(row, len(group))) for row, _ in group]
            for group in members
        ]

    def facts(self) -> dict[str, float | None]:
        """Metrics of the batch itself: lag, rewards by role and bucket, replay age, truncation."""
        import polars as pl

        rows = self.rollouts
        again = rows.filter(pl.col("role") == "replay")
        facts: dict[str, Any] = {
            "lag": self.lag,
            "truncated_share": (rows["finish_reason"] == "length").mean(),
            "reward_fresh": rows.filter(pl.col("role") == "fresh")["reward"].mean(),
            "reward_replay": again["reward"].mean(),
        }
        if self.curated is not None:
            ages = self.curated["step"] - self.curated["collected_step"]
            facts |= {"replay_age_mean": ages.mean(), "replay_age_max": ages.max()}
            buckets = self.curated.filter(pl.col("rank") == 1).select("problem_id", "bucket")
            of_bucket = again.join(buckets, on="problem_id")
            for bucket, chosen in of_bucket.group_by("bucket"):
                facts[f"reward_replay_{bucket[0]}"] = chosen["reward"].mean()
        return {f"train/{name}": None if v is None else float(v) for name, v in facts.items()}


def _by_rollout(data: pl.DataFrame) -> dict[str, Tensor]:
    return dict(zip(data["rollout_id"], list_rows(data["logprobs"]), strict=True))


def _read_rollouts(path: Path, step: int) -> pl.DataFrame:
    columns = [
        "rollout_id", "step", "problem_id", "sample", "role", "policy", "prompt_ids", "token_ids",
        "logprobs", "finish_reason",
    ]  # fmt: skip
    data = tables.read_table("rollouts", path, columns, step=step)
    if data.is_empty():
        raise InputError(f"{path}: no rollouts; there is nothing to train on")
    policies = data["policy"].unique().sort().to_list()
    if len(policies) > 1:
        raise InputError(
            f"{path}: rollouts of the policies {policies[0]} and {policies[1]} lie together"
        )
    return data


def _read_rewards(path: Path, rollouts: pl.DataFrame, where: str) -> pl.DataFrame:
    data = tables.read_table("verdicts", path, ["rollout_id", "reward"])
    unjudged = rollouts.join(data, on="rollout_id", how="anti", maintain_order="left")
    if not unjudged.is_empty():
        raise InputError(
            f"{path}: no verdict on rollout {unjudged['rollout_id'][0]} of {where}; run verify"
        )
    unknown = data.join(rollouts, on="rollout_id", how="anti", maintain_order="left")
    if not unknown.is_empty():
        raise InputError(
            f"{path}: a verdict on rollout {unknown['rollout_id'][0]}, which is not in {where};"
            " they are of different steps or runs"
        )
    return data


def _read_scores(path: Path, rollouts: pl.DataFrame, step: int, where: str) -> pl.DataFrame:
    """Log-probabilities of the rollouts under the policy that sampled them."""
    files = [file for file in tables.parquet_files(path) if not file.name.startswith("replay-")]
    columns = ["rollout_id", "policy", "step", "logprobs"]
    data = tables.read_table("scores", files, columns, step=step)
    data = data.join(rollouts.select("rollout_id"), on="rollout_id", how="semi")
    policy = rollouts["policy"][0]
    own = data.filter(data["policy"] == policy).select("rollout_id", "logprobs")
    sizes = dict(zip(own["rollout_id"], own["logprobs"].list.len(), strict=True))
    for rollout_id, tokens in zip(
        rollouts["rollout_id"], rollouts["token_ids"].list.len(), strict=True
    ):
        if rollout_id not in sizes:
            raise InputError(
                f"{path}: no score of rollout {rollout_id} under its policy {policy}; run score for"
                f" step {step}, or train without scores"
            )
        if sizes[rollout_id] != tokens:
            raise InputError(
                f"{path}: rollout {rollout_id} has {sizes[rollout_id]} logprobs, but {tokens}"
                f" tokens in {where}; run score again"
            )
    return own


def _read_curated(path: Path, step: int) -> pl.DataFrame:
    return tables.read_table("curated", path, step=step).sort("problem_id", "rank")
