"""Steps that are sampled by an earlier policy: by hand, by both sides at once, killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from polars.testing import assert_frame_equal

from exgrpo_cli.errors import InputError
from exgrpo_cli.interrupts import LINE
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.runs import sides
from making import parts, settings, small_run
from test_iteration import assert_same_run

ROOT = Path(__file__).parents[1]
Exgrpo = Callable[..., Any]
STEPS = 4


def recipe(guesser: Path, *more: str) -> list[str]:
    sets = settings(
        "loop.lag=1", f"loop.steps={STEPS}", "evaluate.every=2", "evaluate.samples=1",
        "evaluate.bootstrap=100", f"evaluate.problems={{held = '{guesser.parent}/held.jsonl'}}",
        *more,
    )  # fmt: skip
    return [*small_run(guesser), *sets]


@pytest.fixture(scope="module")
def by_hand(exgrpo: Exgrpo, guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Each step is sampled as early as a lag of 1 allows: before the step before is trained."""
    problems = (guesser.parent / "problems.jsonl").read_text().splitlines(keepends=True)
    (guesser.parent / "held.jsonl").write_text("".join(problems[:8]))
    run = RunDir(tmp_path_factory.mktemp("by_hand") / "run")
    exgrpo("init", run.root, *recipe(guesser))
    for step in range(STEPS):
        for stage in ("rollout", "verify", "score", "curate"):
            exgrpo(stage, run.root)  # of the latest step that is planned
        assert run.steps("plan")[-1] == step + 1
        if step > 0:
            said = exgrpo("train", run.root).stderr  # of the latest whose policy is there
            assert run.steps("policy") == list(range(1, step + 1))
            assert "clipping on" in said  # also when replay has started
    exgrpo("train", run.root)
    for step in (0, 2, 4):
        exgrpo("evaluate", run.root, "--step", step)
    return run


def assert_same(one: RunDir, other: RunDir) -> None:
    assert_same_run(one, other, STEPS)
    names = [f"{step_name(step)}/held/rollouts.parquet" for step in (0, 2, 4)]
    for name in names:
        a, b = (pl.read_parquet(run.root / "evaluations" / name) for run in (one, other))
        assert_frame_equal(a, b)
    for mine, theirs in zip(one.read_metrics(), other.read_metrics(), strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("train/loss", "train/ratio_std", "reward/mean", "eval/held/pass@1"):
            assert mine.get(name) == theirs.get(name), name


def test_an_earlier_policy_samples_and_scores(by_hand: RunDir) -> None:
    for step in range(STEPS):
        sampler = step_name(max(step - 1, 0))
        rollouts = parts(by_hand.rollouts(step))
        scores = pl.read_parquet(sorted(by_hand.scores(step).glob("part-*.parquet")))
        candidates = [pl.read_parquet(f) for f in by_hand.scores(step).glob("replay-*.parquet")]
        for table in (rollouts, scores, *candidates):
            assert set(table["policy"]) == {sampler}
        both = rollouts.join(scores, on="rollout_id", suffix="_scored")
        gap: Any = (both["logprobs"].explode() - both["logprobs_scored"].explode()).abs().max()
        assert gap < 1e-4
        curated = pl.read_parquet(by_hand.curated(step))
        assert set(curated["entropy_policy"]) <= {sampler}
        assert curated.height > 0 or step == 0
    metrics = by_hand.read_metrics()[:STEPS]
    assert [line["train/lag"] for line in metrics] == [0, 1, 1, 1]
    assert [line["train/ratio_std"] > 1e-4 for line in metrics] == [False, True, True, True]


def test_two_sides_wait_for_each_others_files(
    exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *recipe(guesser))
    both = [exgrpo.start("run", run.root, "--only", side) for side in ("train", "sample")]
    assert [one.wait(120) for one in both] == [0, 0]
    assert_same(run, by_hand)


class Begun:
    """``exgrpo run`` with its two sides, forked."""

    def __init__(self, exgrpo: Exgrpo, run: RunDir, *words: object) -> None:
        self.folder = run.root.parent
        self.said = (self.folder / "said").open("w+")
        for side in ("sample", "train"):
            (self.folder / side).unlink(missing_ok=True)
        self.parent = exgrpo.start(
            "run", run.root, *words, session=True, stdout=self.said.fileno(),
            stderr=self.said.fileno(), EXGRPO_PIDS=str(self.folder),
            before=f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import forked_sides",
        )  # fmt: skip

    def pids(self) -> dict[str, int]:
        files = {side: self.folder / side for side in ("sample", "train")}
        return {"run": self.parent.pid} | {side: int(f.read_text()) for side, f in files.items()}

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            assert self.parent.poll() is None, f"{path} did not come\n{self.end()}"
            time.sleep(0.005)

    def end(self) -> str:
        """What it said; its processes are gone."""
        below = [psutil.Process(pid) for pid in self.pids().values() if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(below, timeout=30)
        assert alive == []
        self.said.seek(0)
        return self.said.read()


def test_killed_and_taken_up_again_it_ends_the_same(
    exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    for waits_for, who, how, code in (
        (run.rollouts(0), "sample", signal.SIGKILL, 1),
        (run.policy(1), "train", signal.SIGKILL, 1),
        (run.curated(2), "run", signal.SIGKILL, -signal.SIGKILL),
        (run.policy(2), "run", signal.SIGINT, 130),
    ):
        begun = Begun(exgrpo, run, *recipe(guesser))
        begun.wait_for(waits_for)
        os.kill(begun.pids()[who], how)
        assert begun.parent.wait(60) == code
        said = begun.end()
        last = said.splitlines()[-1]
        if code == 1:
            what = {"sample": "sampling", "train": "training"}[who]
            assert last.startswith(f"exgrpo: the process for {what} was killed by signal 9"), said
        if how == signal.SIGINT:
            assert said.count("interrupted") == 1
            assert last == LINE
        assert "Traceback" not in said
        assert not run.is_locked()
    begun = Begun(exgrpo, run)
    assert begun.parent.wait(120) == 0, begun.end()
    assert run.report.exists()
    assert_same(run, by_hand)


@pytest.mark.parametrize(("side", "device"), [("train", "train.device"), ("sample", "score.device")])
def test_a_side_that_fails_ends_the_other(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path, side: str, device: str
) -> None:
    begun = Begun(exgrpo, RunDir(tmp_path / "run"), *recipe(guesser, f"{device}=mps"))
    assert begun.parent.wait(60) == 2
    said = begun.end()
    assert said.count("exgrpo: ") == 1
    assert said.splitlines()[-1].startswith("exgrpo: ")
    assert "mps" in said.splitlines()[-1]


def test_processes_of_their_own(exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path) -> None:
    """Really started, on the last step of a run."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(by_hand.root, run.root)
    for path in (run.policy(STEPS), run.trainer(STEPS), run.root / "evaluations/step-00004"):
        shutil.rmtree(path)
    done = exgrpo("run", run.root)
    assert "loop.lag: sampling and training at the same time, 1 threads each" in done.stderr
    assert_same(run, by_hand)
