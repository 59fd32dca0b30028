"""The metrics of a training step, and what they warn of."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables

if TYPE_CHECKING:
    import torch

    from exgrpo_cli.training.batch import Group
    from exgrpo_cli.training.update import StepResult


ENTROPY_FLOOR = 0.2
"""Below this share of the first step's entropy, a policy hardly explores any more."""

RATIO_CEILING = 10.0
"""No sound training moves a fresh token's probability by this factor within a step, or a few."""

SILENT_SHARE = 0.9
"""With so many groups of equal rewards, a step learns from almost nothing."""


def warnings_of(
    metrics: dict[str, Any], first_entropy: float | None
) -> tuple[dict[str, float | None], list[str]]:
    """Early signs of a run that goes wrong, as metrics, and a line for each.

    Args:
        metrics: of the step, ``train/...``.
        first_entropy: of the run's first step; None where it is not known.

    Returns:
        ``train/entropy_of_start`` and the three ``train/warning_...``, 0 or 1; the lines.
    """
    entropy, ratio = metrics["train/entropy"], metrics["train/ratio_max"]
    share = entropy / first_entropy if entropy is not None and first_entropy else None
    silent = metrics["train/zero_advantage_groups"] / max(metrics["train/groups"], 1)
    collapse = (
        f"entropy is {share or 0:.0%} of the first step's: the policy is collapsing; raise"
        " objective.entropy_bonus or lower train.learning_rate"
    )
    jump = (
        f"a fresh token's probability rose {ratio or 0:.3g} times since it was sampled; lower"
        " train.learning_rate, or set objective.clip = on"
    )
    silence = (
        f"{silent:.0%} of the groups have equal rewards and teach nothing; are the problems too"
        " hard or too easy, or is the verifier wrong?"
    )
    found = {
        "entropy": (share is not None and share < ENTROPY_FLOOR, collapse),
        "ratio": (ratio is not None and ratio > RATIO_CEILING, jump),
        "groups": (silent > SILENT_SHARE, silence),
    }
    flags = {f"train/warning_{name}": float(is_bad) for name, (is_bad, _) in found.items()}
    lines = [words for is_bad, words in found.values() if is_bad]
    return {"train/entropy_of_start": share, **flags}, lines


def step_metrics(
    result: StepResult, groups: list[Group], seconds: float, device: torch.device
) -> dict[str, Any]:
    from exgrpo_cli.training.objective import summarise

    rows = [row for group in groups for row in group]
    tokens = sum(len(row.token_ids) for row in rows)
    sums = result.sums

    def mean(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if sums.get(count) and name in sums else None

    values: dict[str, float | None] = {
        "loss": _finite_mean(result.losses),
        **summarise(sums),
        "entropy": mean("entropy", "tokens"),
        "sampling_logp_difference_mean": mean("sampler_difference", "sampler_tokens"),
        "sampling_logp_difference_max": sums.get("sampler_difference_max"),
        "sampling_ratio_mean": mean("sampler_ratio", "sampler_tokens"),
        "sampling_ratio_std": _deviation(sums),
        "sampling_ratio_max": sums.get("sampler_ratio_max"),
        "grad_norm": _finite_mean(result.norms),
        "updates": result.updates,
        "skipped_updates": len(result.skipped),
        "learning_rate": result.learning_rate,
        "rows": len(rows),
        "replayed_rows": sum(row.replayed for row in rows),
        "groups": len(groups),
        "zero_advantage_groups": sum(not any(r.advantage for r in group) for group in groups),
        "tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "peak_memory_mb": _peak_memory(device),
    }
    if "kl_reference" in sums:
        values["kl_reference"] = mean("kl_reference", "tokens")
    if "sampler_capped" in sums:
        values["sampling_capped_share"] = mean("sampler_capped", "sampler_tokens")
    return {f"train/{name}": tables.finite_or_none(value) for name, value in values.items()}


def _deviation(sums: Mapping[str, float]) -> float | None:
    """Standard deviation of the ratio between trainer and engine."""
    count = sums.get("sampler_tokens", 0.0)
    if not count:
        return None
    mean = sums["sampler_ratio"] / count
    variance = sums["sampler_ratio_square"] / count - mean * mean
    return math.sqrt(variance) if variance > 0 else 0.0 if math.isfinite(variance) else math.nan


def _finite_mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _peak_memory(device: torch.device) -> float:
    """MiB: the most that torch held on a GPU in this step, or that a process ever took."""
    import resource

    import torch

    from exgrpo_cli.training import distributed

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak /= 2**20 if sys.platform == "darwin" else 2**10
    return max(distributed.gather(peak))
