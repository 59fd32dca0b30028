"""Whole iterations on a real pretrained language model: ``make test-lm``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from safetensors import safe_open

from exgrpo_cli.rundir import RunDir
from making import parts, settings

MODEL = os.environ.get("EXGRPO_LM", "")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not MODEL, reason="needs a language model of 93 MB to download: make test-lm"
    ),
]

Exgrpo = Callable[..., Any]


@pytest.fixture(scope="module")
def sums(exgrpo: Exgrpo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sums") / "sums.parquet"
    exgrpo(
        "problems", "reasoning_gym:chain_sum", "--count", 60, "--set", "max_terms=3",
        "--set", "max_digits=2", "--out", out,
    )  # fmt: skip
    return out


def small(sums: Path, *more: str) -> list[object]:
    """The demo's recipe with few questions, which replays from the second step on."""
    return [
        "--recipe", "recipes/demo-lm.toml", "--model", MODEL, "--problems", sums,
        *settings(
            "curate.questions=6", "rollout.samples=6", "curate.start_success=0.02",
            "curate.store_before_start=true", "evaluate.every=0", *more,
        ),
    ]  # fmt: skip


def gap(run: RunDir, step: int) -> pl.Series:
    """By how much engine and score differ, nats, a token."""
    rollouts = parts(run.rollouts(step))
    scores = pl.concat([pl.read_parquet(file) for file in run.scores(step).glob("part-*")])
    both = rollouts.join(scores, on="rollout_id", suffix="_scored")
    assert both.height == rollouts.height > 20
    return (both["logprobs"].explode() - both["logprobs_scored"].explode()).abs()


def weights(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_killed_run_goes_on_with_the_whole_loop(
    exgrpo: Exgrpo, sums: Path, tmp_path: Path
) -> None:
    import torch

    run = RunDir(tmp_path / "run")
    first = exgrpo.start("run", run.root, *small(sums), "--engine", "vllm", "--steps", 2)
    deadline = time.monotonic() + 1800
    while not list(run.verdicts(1).glob("part-*")) and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    exgrpo("run", run.root, "--engine", "vllm", "--steps", 2)
    rows = [parts(run.rollouts(step)) for step in range(2)]
    for step in range(2):
        difference = gap(run, step)
        assert difference.mean() < 0.02, step  # one computes in float32, the other in bfloat16
        assert difference.max() < 0.5, step
        ended = rows[step].filter(finish_reason="stop")
        assert ended.height > 0.8 * rows[step].height
        assert set(ended["token_ids"].list.last()) == {2}  # <|im_end|>, which the text leaves out
        assert not rows[step]["text"].str.contains("<|", literal=True).any()
    verdicts = [parts(run.verdicts(step)) for step in range(2)]
    assert {*verdicts[0]["verifier"]} == {"reasoning_gym"}
    assert 0.05 < verdicts[0]["correct"].mean() < 0.8
    metrics = run.read_metrics()
    assert metrics[1]["train/replayed_rows"] > 0
    assert metrics[1]["train/ratio_mean"] == pytest.approx(1, abs=0.02)

    before, after = weights(Path(MODEL)), weights(run.policy(2))
    assert before.keys() == after.keys()  # a tied head is saved once
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    said = exgrpo("evaluate", run.root, "--problems", sums, "--samples", 1, "--json")
    assert 0 < json.loads(said.stdout)["sums"]["overall"]["pass@1"] < 1
    exgrpo("report", run.root)


def test_an_adapter_is_trained_sampled_and_merged(
    exgrpo: Exgrpo, sums: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    lora = small(sums, "lora.enabled=true", "lora.rank=8", "train.learning_rate=2e-4")
    exgrpo("run", run.root, *lora, "--engine", "vllm", "--steps", 2)
    assert gap(run, 1).mean() < 0.02
    exgrpo("merge", run.root, tmp_path / "merged")
    merged, base = weights(tmp_path / "merged"), weights(Path(MODEL))
    assert merged.keys() == base.keys()
    assert merged["model.layers.0.mlp.up_proj.weight"].dtype == base["model.norm.weight"].dtype
