"""The demo's recipe learns, and whole iterations through the real vLLM."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.rundir import RunDir
from small_runs import SMALL, parts

Exgrpo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.vllm
def test_iterations_with_vllm(exgrpo: Exgrpo, demo_model: Path, tmp_path: Path) -> None:
    """Two iterations in one process: the second samples from weights reloaded in place."""
    run = RunDir(tmp_path / "run")
    done = exgrpo(
        "run", run.root, *SMALL, "--model", demo_model, "--engine", "vllm", "--steps", 2,
        "--profile", "--set", "rollout.entropy_top_k=8",
    )  # fmt: skip
    assert "overhead / compute" in done.stdout
    assert run.read_metrics()[1]["profile/compute"] > 0
    for step in range(2):
        rollouts = parts(run.rollouts(step))
        assert rollouts.height >= 8 * 3
        assert rollouts["entropies"].null_count() == rollouts.height
        scores = pl.read_parquet(sorted(run.scores(step).glob("part-*.parquet")))
        both = rollouts.join(scores, on="rollout_id", suffix="_scored")
        gap: Any = (both["logprobs"].explode() - both["logprobs_scored"].explode()).abs().max()
        assert gap < 1e-3, step
        assert set(rollouts["entropy_source"]) == {"topk"}
        off: Any = (both["mean_entropy"] - both["mean_entropy_scored"]).abs().max()
        assert off < 0.02, step
    assert run.read_metrics()[1]["train/replayed_rows"] > 0
    assert run.policy(2).is_dir()


@pytest.mark.vllm
def test_the_rollout_command_with_vllm(exgrpo: Exgrpo, demo_model: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *SMALL, "--model", demo_model)
    result = exgrpo("rollout", run.root, "--engine", "vllm", "--shard", "0/3", "--json")
    assert json.loads(result.stdout)["parts_done"] == 1
    assert json.loads(result.stdout)["rows"] == 12
    assert [p.name for p in run.rollouts(0).iterdir()] == ["part-00000-of-00003.parquet"]


def test_ten_steps_of_the_demo_raise_held_out_accuracy(
    exgrpo: Exgrpo, demo_model: Path, tmp_path: Path
) -> None:
    """The recipe of `make demo`, a fifth of it; its whole curve is in the README."""
    run = RunDir(tmp_path / "run")
    exgrpo(
        "run", run.root, "--recipe", "recipes/demo.toml", "--model", demo_model,
        "--engine", "transformers", "--steps", 10, "--set", "evaluate.samples=2",
    )  # fmt: skip
    before, after = (run.read_metrics()[i]["eval/heldout/pass@1"] for i in (0, 10))
    assert 0.15 < before < 0.35
    assert after > before + 0.08
