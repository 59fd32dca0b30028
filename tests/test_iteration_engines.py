"""The demo's recipe learns, and whole iterations through the real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.rundir import RunDir
from making import parts, settings, small_run

Exgrpo = Callable[..., Any]


@pytest.mark.vllm
def test_iterations_with_vllm(exgrpo: Exgrpo, guesser: Path, tmp_path: Path) -> None:
    """Two iterations in one process: the second samples from weights reloaded in place."""
    run = RunDir(tmp_path / "run")
    exgrpo(
        "run", run.root, *small_run(guesser), "--engine", "vllm", "--steps", 2,
        "--set", "rollout.entropy_top_k=8",
    )  # fmt: skip
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
def test_the_rollout_command_with_vllm(exgrpo: Exgrpo, guesser: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *small_run(guesser))
    result = exgrpo("rollout", run.root, "--engine", "vllm", "--shard", "0/3", "--json")
    assert json.loads(result.stdout)["done"] == 1
    assert json.loads(result.stdout)["rows"] == 12
    assert [p.name for p in run.rollouts(0).iterdir()] == ["part-00000-of-00003.parquet"]


# Every sixth response of the guesser begins with this letter, and every sixth has this hash.
REWARDS = """
import hashlib

def letter(response, answer, metadata):
    return float(response.startswith("c"))

def coin(response, answer, metadata):
    return float(hashlib.sha256((response + answer).encode()).digest()[0] < 43)
"""


@pytest.mark.parametrize("reward", ["letter", "coin"])
def test_the_loop_learns_what_is_rewarded(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path, reward: str
) -> None:
    """A share of 256 responses has a deviation of .023 at 1/6; five updates bring it to .88."""
    run, function = RunDir(tmp_path / "run"), tmp_path / "rewards.py"
    function.write_text(REWARDS)
    exgrpo(
        "run", run.root, *small_run(guesser), "--steps", 6, *settings(
            "curate.questions=16", "rollout.samples=16", "train.learning_rate=0.01",
            f"problems.verifier={function}:{reward}",
        ),
    )  # fmt: skip
    shares = [parts(run.rollouts(step))["text"].str.starts_with("c").mean() for step in (0, 5)]
    assert shares[0] == pytest.approx(1 / 6, abs=0.1)
    assert shares[1] > 0.6 if reward == "letter" else shares[1] < 0.4
