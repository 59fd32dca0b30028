"""The demo's recipe learns, and whole iterations through the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.step import Step
from exgrpo_cli.training.batch import Batch
from making import parts, settings, small_run, teacher

Exgrpo = Callable[..., Any]


@pytest.fixture(scope="module")
def sampled(exgrpo: Exgrpo, guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two iterations in one process: the second samples from weights reloaded in place. All is
    stored, a teacher's trajectories too, and failures are replayed first."""
    run = RunDir(tmp_path_factory.mktemp("sampled") / "run")
    rules = ("store=true", "replayed=2", "choose=reward", "bucket=least(k, 1)", "bucket_weight=1")
    exgrpo("init", run.root, *small_run(guesser), *settings(*(f"curate.{rule}" for rule in rules)))
    exgrpo("import", run.root, teacher(guesser))
    exgrpo("run", run.root, "--engine", "vllm", "--steps", 2, "--set", "rollout.entropy_top_k=8")
    return run


@pytest.mark.vllm
def test_iterations_with_vllm(sampled: RunDir) -> None:
    for step in range(2):
        rollouts = parts(sampled.rollouts(step))
        assert rollouts.height >= 8 * 3
        assert rollouts["entropies"].null_count() == rollouts.height
        scores = pl.read_parquet(sorted(sampled.scores(step).glob("part-*.parquet")))
        both = rollouts.join(scores, on="rollout_id", suffix="_scored")
        gap: Any = (both["logprobs"].explode() - both["logprobs_scored"].explode()).abs().max()
        assert gap < 1e-3, step
        assert set(rollouts["entropy_source"]) == {"topk"}
        off: Any = (both["mean_entropy"] - both["mean_entropy_scored"]).abs().max()
        assert off < 0.02, step
    assert sampled.policy(2).is_dir()


@pytest.mark.vllm
def test_failures_and_a_teachers_trajectories_are_replayed_with_vllm(
    exgrpo: Exgrpo, sampled: RunDir
) -> None:
    for stage in ("rollout", "verify", "score", "curate", "train"):  # the third, by hand
        exgrpo(stage, sampled.root, *(["--engine", "vllm"] if stage == "rollout" else []))
    rows = [row for step in (1, 2) for row in pl.read_parquet(sampled.curated(step)).to_dicts()]
    assert len(rows) == 2 * 2 * 4
    assert {(row["rollout_id"][0], row["rank"], row["reward"]) for row in rows} >= {
        ("s", 1, 0.0), ("i", 1, 0.0), ("i", 2, 1.0)
    }  # fmt: skip
    assert {row["logprob_source"] for row in rows} == {"score"}
    for step in (1, 2):
        recipe = load_recipe(sampled.recipe)
        groups = Batch.read(Step.of(sampled, step)).groups(recipe)
        again = [rows for rows in groups if rows[0].replayed]
        assert [[row.replayed for row in rows] for rows in again] == [
            [True, True, False, False]
        ] * 4
        assert all(rows[0].advantage <= 0 for rows in again)
    metrics = sampled.read_metrics()
    assert [line["train/replayed_rows"] for line in metrics] == [0, 8, 8]
    assert [line["train/skipped_updates"] for line in metrics] == [0, 0, 0]
    assert sampled.policy(3).is_dir()


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
