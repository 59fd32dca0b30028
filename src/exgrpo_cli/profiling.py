"""`exgrpo run --profile`: where an iteration's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from exgrpo_cli import tables

STAGES = ("rollout", "verify", "score", "curate", "train")


def compute_seconds(stage: str, result: Mapping[str, Any], verdicts: Path, workers: int) -> float:
    """Of a stage's time, what went into the work itself.

    That is: waiting for the engine's tokens (rollout), verifying (the time in the workers, shared
    among them), forward passes (score), updates (train). Everything else is overhead: starting,
    opening models, reading, writing, curation.

    Args:
        stage: one of :data:`STAGES`.
        result: what it returned.
        verdicts: the step's verdicts.
        workers: how many judged.
    """
    if stage == "verify":
        seconds = tables.read_table("verdicts", verdicts, ["seconds"])["seconds"]
        return float(seconds.sum()) / workers
    if stage == "train":
        rate = result.get("train/tokens_per_second")
        return float(result["train/tokens"]) / rate if rate else 0.0
    return float(result.get("compute_seconds", 0.0))


def profile_metrics(
    wall: Mapping[str, float], compute: Mapping[str, float], iteration: float
) -> dict[str, float]:
    """An iteration's profile as metrics.

    Args:
        wall: seconds of each stage.
        compute: of them, those of :func:`compute_seconds`.
        iteration: seconds of the whole iteration, evaluation not counted.
    """
    computing = sum(compute.values())
    metrics = {}
    for stage in wall:
        metrics[f"profile/{stage}_compute"] = compute[stage]
        metrics[f"profile/{stage}_overhead"] = wall[stage] - compute[stage]
    metrics["profile/other_overhead"] = iteration - sum(wall.values())
    metrics["profile/compute"] = computing
    metrics["profile/overhead"] = iteration - computing
    return metrics


def profile_table(iterations: Sequence[Mapping[str, Any]]) -> str:
    """The mean over iterations, a line a stage.

    The first iteration opens the engine and loads libraries; where there are others it is left
    out.

    Args:
        iterations: the metrics of each, in order; those without a profile are passed over.
    """
    profiled = [one for one in iterations if one.get("profile/compute") is not None]
    if not profiled:
        return "profile: no iteration was run"
    counted = profiled[1:] or profiled
    steps = f"steps {counted[0]['step']} to {counted[-1]['step']}"
    lines = [f"{steps + ', seconds':24}{'compute':>10}{'overhead':>10}"]

    def line(name: str, compute: float, overhead: float) -> str:
        return f"{name:24}{compute:10.2f}{overhead:10.2f}"

    def mean(key: str) -> float:
        return fmean(float(one.get(f"profile/{key}") or 0.0) for one in counted)

    for stage in STAGES:
        if any(f"profile/{stage}_compute" in one for one in counted):
            lines.append(line(stage, mean(f"{stage}_compute"), mean(f"{stage}_overhead")))
    lines.append(line("between the stages", 0.0, mean("other_overhead")))
    compute, overhead = mean("compute"), mean("overhead")
    share = f"  overhead / compute {overhead / compute:.1%}" if compute > 0 else ""
    lines.append(line("iteration", compute, overhead) + share)
    if len(profiled) > 1:
        first = profiled[0]
        lines.append(
            line(f"step {first['step']}, with start-up", *(
                float(first[f"profile/{kind}"]) for kind in ("compute", "overhead")
            ))
        )  # fmt: skip
    return "\n".join(lines)
