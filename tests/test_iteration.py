"""Whole iterations through the real command: by hand, in the loop, killed, sharded, with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from safetensors.numpy import load_file

from exgrpo_cli.metrics import spent
from exgrpo_cli.rundir import RunDir
from making import parts, settings, small_run

Exgrpo = Callable[..., Any]


def assert_same_run(one: RunDir, other: RunDir, steps: int) -> None:
    """The same samples, verdicts, choices and plans, and the same bits of weights."""
    for step in range(steps):
        for kind in ("rollouts", "verdicts", "scores"):
            a, b = (parts(getattr(run, kind)(step)) for run in (one, other))
            drop = ["seconds"] if kind == "verdicts" else []
            assert_frame_equal(a.drop(drop), b.drop(drop))
        for kind in ("plan", "curated"):
            a, b = (pl.read_parquet(getattr(run, kind)(step)) for run in (one, other))
            assert_frame_equal(a, b)
        weights = [load_file(run.policy(step + 1) / "model.safetensors") for run in (one, other)]
        assert weights[0].keys() == weights[1].keys()
        for name in weights[0]:
            assert (weights[0][name] == weights[1][name]).all(), name
    for kind in ("experience", "questions"):
        assert_frame_equal(*(pl.read_parquet(getattr(run, kind)) for run in (one, other)))


@pytest.fixture(scope="module")
def looped(exgrpo: Exgrpo, guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Three iterations by ``exgrpo run``."""
    run = RunDir(tmp_path_factory.mktemp("looped") / "run")
    held = run.root.with_name("held.jsonl")
    held.write_text("".join((guesser.parent / "problems.jsonl").open().readlines()[:3]))
    exgrpo(
        "run", run.root, *small_run(guesser), "--steps", 3, "--track", "tensorboard", *settings(
            f"evaluate.problems={{held = '{held}'}}", "evaluate.every=3", "evaluate.samples=1",
        ),
    )  # fmt: skip
    return run


def test_the_loop_leaves_a_whole_run(looped: RunDir) -> None:
    rollouts = parts(looped.rollouts(0))
    assert rollouts.height == 8 * 4
    assert rollouts["rollout_id"].n_unique() == rollouts.height
    verdicts = parts(looped.verdicts(0))
    assert verdicts["rollout_id"].to_list() == rollouts["rollout_id"].to_list()
    assert 0 < verdicts["reward"].mean() < 1  # type: ignore[operator]
    assert pl.read_parquet(looped.experience).height > 0
    assert pl.read_parquet(looped.curated(1)).height > 0  # replay started after step 0's success
    metrics = looped.read_metrics()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]  # the last one evaluated
    assert metrics[0]["replay/started"] == 0
    assert metrics[1]["replay/started"] == 1
    assert metrics[1]["train/replayed_rows"] == pl.read_parquet(looped.curated(1)).height
    assert looped.report.exists()
    assert looped.recipe.exists()


def test_what_was_spent_is_what_the_tables_hold(looped: RunDir) -> None:
    sampled = [parts(looped.rollouts(step)) for step in range(3)]
    sums = {name: dict(points)[3] for name, points in spent(looped.read_metrics()).items()}
    assert sums["tokens"] == sum(len(ids) for frame in sampled for ids in frame["token_ids"])
    fresh = [frame.filter(role="fresh")["problem_id"].n_unique() for frame in sampled]
    assert sums["questions"] == sum(fresh)
    assert sampled[2].filter(role="replay").height > 0
    assert sums["updates"] == 3
    assert sums["seconds"] > 0


def test_metrics_reach_the_tracker(looped: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(looped.root / "tensorboard"))
    events.Reload()
    sent = events.Scalars("reward/mean")
    kept = looped.read_metrics()[:3]
    assert [event.step for event in sent] == [line["step"] for line in kept]
    assert [e.value for e in sent] == pytest.approx([line["reward/mean"] for line in kept])
    first, last = events.Tensors("rollouts/text_summary")
    assert (first.step, last.step) == (0, 3)  # where policies were evaluated
    table = last.tensor_proto.string_val[0].decode().splitlines()
    assert table[:2] == ["| question | response | verdict | role | age |", "|" + " --- |" * 5]
    rows = [line.strip("| ").split(" | ") for line in table[2:]]
    assert {row[3] for row in rows} == {"fresh", "replay", "replayed"}
    assert {row[2] for row in rows if row[3] == "replayed"} == {"right"}
    assert all((int(row[4]) > 0) == (row[3] == "replayed") for row in rows)


def test_scores_are_the_engines_log_probabilities_to_rounding(looped: RunDir) -> None:
    rollouts, scores = (
        parts(looped.rollouts(1)),
        pl.read_parquet(sorted(looped.scores(1).glob("part-*.parquet"))),
    )
    both = rollouts.join(scores, on="rollout_id", suffix="_scored")
    assert both.height == rollouts.height
    for name in ("logprobs", "entropies"):
        sampled, scored = both[name].explode(), both[f"{name}_scored"].explode()
        assert (sampled - scored).abs().max() < 1e-4  # type: ignore[operator]


def test_stages_by_hand_and_in_shards_make_the_same_run(
    exgrpo: Exgrpo, guesser: Path, looped: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *small_run(guesser))
    for step in range(2):
        for shard in ("1/2", "0/2"):
            exgrpo("rollout", run.root, "--engine", "transformers", "--shard", shard)
        # As a SLURM array whose tasks count from 1.
        for task in ("1", "2"):
            exgrpo(
                "verify", run.root,
                SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_COUNT="2", SLURM_ARRAY_TASK_MIN="1",
            )  # fmt: skip
        exgrpo("score", run.root)
        exgrpo("curate", run.root)
        result = exgrpo("train", run.root, "--json")
        assert json.loads(result.stdout)["train/updates"] == 1
        assert run.policy(step + 1).is_dir()
    # The loop has gone on to a third step; without it, its tables are those of the second.
    shutil.copytree(looped.root, tmp_path / "copy")
    copy = RunDir(tmp_path / "copy")
    shutil.rmtree(copy.rollouts(2))
    exgrpo("curate", copy.root, "--step", 1, "--rebuild", "--force")
    assert_same_run(run, copy, 2)


def test_what_came_of_other_rollouts_is_not_kept(
    exgrpo: Exgrpo, looped: RunDir, tmp_path: Path
) -> None:
    """Rollouts that are sampled again take their verdicts and scores with them."""
    run = RunDir(tmp_path / "copy")
    shutil.copytree(looped.root, run.root)
    (part,) = sorted(run.rollouts(2).glob("*.parquet"))[:1]
    part.unlink()
    exgrpo("rollout", run.root, "--step", 2, "--engine", "transformers")
    assert part.exists()
    for folder in (run.verdicts(2), run.scores(2)):
        assert not (folder / part.name).exists()
        assert len(list(folder.glob("part-*.parquet"))) == 2
    exgrpo("verify", run.root, "--step", 2)
    rollouts, verdicts = parts(run.rollouts(2)), parts(run.verdicts(2))
    assert rollouts["rollout_id"].to_list() == verdicts["rollout_id"].to_list()
    done = exgrpo("train", run.root, "--step", 2)
    assert "is left as it is" in done.stderr


def test_a_killed_run_goes_on_and_ends_the_same(
    exgrpo: Exgrpo, guesser: Path, looped: RunDir, tmp_path: Path
) -> None:
    """kill -9 in the middle of each step's work, and once more right after a policy appears."""
    run = RunDir(tmp_path / "run")
    arguments = ["run", run.root, *small_run(guesser), "--steps", 3]
    for waits_for in (run.rollouts(0), run.curated(0), run.policy(1), run.verdicts(2)):
        child = exgrpo.start(*arguments, session=True)
        deadline = time.monotonic() + 120
        while not waits_for.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert child.poll() is None, "the run ended before it was killed"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    exgrpo(*arguments)
    assert_same_run(run, looped, 3)
    assert [line["step"] for line in run.read_metrics()] == [0, 1, 2]
    for mine, theirs in zip(run.read_metrics(), looped.read_metrics(), strict=False):
        for name in ("train/loss", "train/grad_norm", "reward/mean", "pool/trajectories"):
            assert mine[name] == theirs[name], name


def test_loose_files_need_no_run_directory(exgrpo: Exgrpo, guesser: Path, tmp_path: Path) -> None:
    problems, out = tmp_path / "problems.parquet", tmp_path
    exgrpo("problems", guesser.parent / "problems.jsonl", "--limit", 6, "--out", problems)
    plain = ["--set", "model.template=plain", "--set", "rollout.max_new_tokens=72"]
    exgrpo(
        "rollout", "--problems", problems, "--policy", guesser, "--out", out / "rollouts",
        "--samples", 4, "--engine", "transformers", *plain,
    )  # fmt: skip
    exgrpo(
        "verify", "--rollouts", out / "rollouts", "--problems", problems,
        "--out", out / "verdicts", "--workers", 1,
    )  # fmt: skip
    exgrpo("score", "--rollouts", out / "rollouts", "--policy", guesser, "--out", out / "scores")
    exgrpo(
        "train", "--policy", guesser, "--rollouts", out / "rollouts",
        "--verdicts", out / "verdicts", "--scores", out / "scores", "--out", out / "next",
        "--lr", "1e-4",
    )  # fmt: skip
    before, after = (load_file(p / "model.safetensors") for p in (guesser, out / "next"))
    assert any((before[name] != after[name]).any() for name in before)
    curated = exgrpo(
        "curate", out / "pool", "--rollouts", out / "rollouts", "--verdicts", out / "verdicts",
        "--scores", out / "scores", "--problems", problems, "--json", *plain,
        "--set", "rollout.samples=4", "--set", "curate.store_before_start=true",
    )  # fmt: skip
    pool = pl.read_parquet(out / "pool/experience.parquet")
    assert json.loads(curated.stdout)["pool/trajectories"] == pool.height > 0
    assert set(pool["entropy_source"]) == {"score"}
    shown = exgrpo("show", out / "verdicts", "--json")
    assert json.loads(shown.stdout)["rows"] == 24


def test_lora_adapters_are_sampled_by_the_next_rollout(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo(
        "run", run.root, *small_run(guesser), "--steps", 2,
        *settings("lora.enabled=true", "lora.rank=4", "train.learning_rate=1e-2"),
    )  # fmt: skip
    assert (run.policy(1) / "adapter_model.safetensors").exists()
    assert not (run.policy(1) / "model.safetensors").exists()
    rollouts = parts(run.rollouts(1))
    scores = pl.read_parquet(sorted(run.scores(1).glob("part-*.parquet")))
    both = rollouts.join(scores, on="rollout_id", suffix="_scored")
    gap = (both["logprobs"].explode() - both["logprobs_scored"].explode()).abs().max()
    assert gap < 1e-4  # type: ignore[operator]
