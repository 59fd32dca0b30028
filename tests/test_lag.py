"""Steps that are sampled by an earlier policy: by hand, by both sides at once, killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
import torch
from polars.testing import assert_frame_equal

from exgrpo_cli.errors import InputError
from exgrpo_cli.interrupts import LINE
from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import REMOVED, RunDir, step_name
from exgrpo_cli.runs import sides
from making import parts, settings, small_run
from test_iteration import assert_same_run

ROOT = Path(__file__).parents[1]
Exgrpo = Callable[..., Any]
STEPS = 3
EVALUATED = (0, 2, 3)


def recipe(guesser: Path, *more: str) -> list[str]:
    sets = settings(
        "loop.lag=1", f"loop.steps={STEPS}", "train.keep=9", "evaluate.every=2",
        "evaluate.samples=1", "evaluate.bootstrap=100",
        f"evaluate.problems={{held = '{guesser.parent}/held.jsonl'}}",
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
    for step in EVALUATED:
        exgrpo("evaluate", run.root, "--step", step)
    return run


def assert_same(one: RunDir, other: RunDir) -> None:
    assert_same_run(one, other, STEPS)
    for step in EVALUATED:
        files = [run.evaluation(step, "held") / "rollouts.parquet" for run in (one, other)]
        assert_frame_equal(*map(pl.read_parquet, files))
    for mine, theirs in zip(one.read_metrics(), other.read_metrics(), strict=True):
        names = [{n for n in line if not n.startswith("time/")} for line in (mine, theirs)]
        assert names[0] == names[1]
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
    assert [line["train/lag"] for line in metrics] == [0, 1, 1]
    assert [line["train/ratio_std"] > 1e-4 for line in metrics] == [False, True, True]


def back_to(run: RunDir, step: int) -> None:
    """As if the steps from one on were not trained yet."""
    for number in range(step + 1, STEPS + 1):
        for path in (run.policy(number), run.trainer(number), run.evaluation(number, "held")):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def ahead(by_hand: RunDir, tmp_path: Path) -> RunDir:
    """Steps 1 and 2 are sampled, and not trained."""
    run = RunDir(tmp_path / "ahead")
    shutil.copytree(by_hand.root, run.root)
    back_to(run, 1)
    return run


def test_what_lies_ahead(exgrpo: Exgrpo, ahead: RunDir) -> None:
    said = exgrpo("status", ahead.root).stdout
    assert f"next: exgrpo train {ahead.root} --step 1" in said
    assert [line for line in said.splitlines() if line.startswith("step 2 (")]
    refused = exgrpo("init", ahead.root, "--set", "loop.lag=0", code=2).stderr
    assert "loop.lag was 1 when step 2 was sampled" in refused
    assert "train steps 1 to 2 first" in refused
    refused = exgrpo("rollout", ahead.root, "--step", 1, "--force", code=2).stderr
    assert "--discard-later" in refused
    refused = exgrpo("train", ahead.root, "--step", 2, code=2).stderr
    assert f"{ahead.policy(2)}: step 2 has no policy yet; run: exgrpo train" in refused
    for number in (1, 2):
        shutil.rmtree(ahead.scores(number))
    (file,) = sorted(ahead.rollouts(1).glob("*.parquet"))[:1]
    table = pl.read_parquet(file).with_columns(policy=pl.lit(step_name(1)))
    table.write_parquet(file)
    refused = exgrpo("score", ahead.root, "--step", 1, code=2).stderr
    assert "sampled by policy step-00001, and loop.lag = 1 means step-00000" in refused


def test_a_lag_that_needs_a_removed_policy_is_refused_first(
    exgrpo: Exgrpo, by_hand: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(by_hand.root, run.root)
    for lag in (3, 1):  # all policies are there
        exgrpo("init", run.root, "--set", f"loop.lag={lag}")
    (run.policy(1) / REMOVED).write_text("removed to save disk")
    recipe = run.recipe.read_text()
    for lag, step in ((2, 3), (3, 4)):  # step 3 could be sampled by policy 0, with a lag of 3
        words = ["--set", f"loop.lag={lag}"]
        for command in (["init"], ["run", "--steps", 6]):
            refused = exgrpo(command[0], run.root, *command[1:], *words, code=2).stderr
            assert f"step {step} is to be sampled by policy 1, which was removed" in refused
            assert "the largest lag that works now is 1;" in refused
    assert run.recipe.read_text() == recipe
    run.recipe.write_text(recipe.replace("lag = 1", "lag = 3").replace("steps = 3", "steps = 6"))
    for only in ([], ["--only", "sample"]):
        assert "the largest lag" in exgrpo("run", run.root, *only, code=2).stderr
    assert run.steps("rollouts") == [0, 1, 2]


def test_a_run_that_goes_on_from_another_begins_with_its_policy(
    exgrpo: Exgrpo, by_hand: RunDir, tmp_path: Path
) -> None:
    run, other = RunDir(tmp_path / "run"), RunDir(tmp_path / "other")
    shutil.copytree(by_hand.root, other.root)
    (other.policy(1) / REMOVED).write_text("removed to save disk")
    exgrpo("init", run.root, "--from", other.root, "--step", 2, "--set", "loop.lag=3")
    exgrpo("rollout", run.root)
    assert set(parts(run.rollouts(2))["policy"]) == {step_name(2)}


def test_without_scores_the_engines_log_probabilities_are_the_old_ones(
    exgrpo: Exgrpo, by_hand: RunDir, ahead: RunDir
) -> None:
    shutil.rmtree(ahead.scores(1))
    exgrpo("train", ahead.root, "--step", 1)
    for name in ("train/ratio_std", "train/kl_old", "train/loss"):
        scored, unscored = (run.read_metrics()[1][name] for run in (by_hand, ahead))
        assert unscored == pytest.approx(scored, rel=1e-2, abs=1e-6), name


def test_what_each_side_gets_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(count: int, *sets: str) -> tuple[str | None, str | None]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        found = sides.split_devices(load_recipe(None, ["rollout.engine=transformers", *sets]))
        return tuple(one.get("CUDA_VISIBLE_DEVICES") for one in (found.sample, found.train))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shares(8, "rollout.processes=3", "train.processes=4") == ("0,1,2", "3,4,5,6")
    assert shares(8, "score.processes=2") == ("0,1", "2")
    assert shares(2, "rollout.device=cpu", "score.enabled=false") == ("", "0")
    assert shares(2, "train.device=cuda:1") == (None, None)
    assert shares(1, "rollout.gpu_memory_utilization=0.5") == (None, None)
    with pytest.raises(InputError, match="sampling takes 1 GPUs and training 1, and 1 are here"):
        shares(1)
    assert shares(0) == (None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-a")
    assert shares(2) == ("7", "GPU-a")


def test_curating_and_training_have_a_lock_each(exgrpo: Exgrpo, ahead: RunDir) -> None:
    with ahead.locked("train"):
        exgrpo("curate", ahead.root, "--step", 2)
        for words in (("train", "--step", 1), ("run",), ("init",)):
            refused = exgrpo(words[0], ahead.root, *words[1:], code=2).stderr
            assert "another exgrpo run, curate or train is at work" in refused
        assert ahead.is_locked()
    assert not ahead.is_locked()


def test_metrics_that_are_recorded_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def record(stage: int) -> None:
        for step in range(12):
            run.record((step + 3 * stage) % 12, f"stage-{stage}", {f"value/{stage}": step})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, range(4)))
    assert [set(line) for line in run.read_metrics()] == [
        {"step", *(f"value/{stage}" for stage in range(4))}
    ] * 12


def test_two_sides_wait_for_each_others_files(
    exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *recipe(guesser))
    both = [exgrpo.start("run", run.root, "--only", side) for side in ("train", "sample")]
    assert [one.wait(120) for one in both] == [0, 0]
    assert_same(run, by_hand)


def test_make_and_slurm(
    guesser: Path, exgrpo: Exgrpo, by_hand: RunDir, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *recipe(guesser))
    make = ["make", "-j2", "-f", "recipes/iterate.mk", f"RUN={run.root}", "STEPS=1"]
    submit = ["recipes/slurm/submit.sh", str(run.root), "1", "2", "2"]
    for command in (make, submit):
        subprocess.run(
            command, cwd=ROOT, env=environment | {"EVALUATE": "2"}, check=True, capture_output=True
        )
    exgrpo("evaluate", run.root, "--step", 0)
    assert_same(run, by_hand)


class Begun:
    """``exgrpo run`` of a run that was begun, its two sides forked."""

    def __init__(self, exgrpo: Exgrpo, run: RunDir) -> None:
        self.folder = run.root.parent
        self.said = (self.folder / "said").open("w+")
        for side in ("sample", "train"):
            (self.folder / side).unlink(missing_ok=True)
        self.parent = exgrpo.start(
            "run", run.root, session=True, stdout=self.said.fileno(),
            stderr=self.said.fileno(), EXGRPO_PIDS=str(self.folder),
            before=f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import forked_sides",
        )  # fmt: skip

    def pids(self) -> dict[str, int]:
        files = {side: self.folder / side for side in ("sample", "train")}
        return {"run": self.parent.pid} | {side: int(f.read_text()) for side, f in files.items()}

    def wait_for(self, path: Path) -> None:
        """For a file, and for both sides to have been started."""
        deadline, wanted = time.monotonic() + 120, (path, self.folder / "train")
        while not all(map(Path.exists, wanted)) and time.monotonic() < deadline:
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
    exgrpo("init", run.root, *recipe(guesser))
    for waits_for, who, how, code in (
        (run.rollouts(0), "sample", signal.SIGKILL, 1),
        (run.policy(1), "train", signal.SIGKILL, 1),
        (run.curated(1), "run", signal.SIGKILL, -signal.SIGKILL),
        (run.curated(1), "run", signal.SIGTERM, 143),
        (run.curated(2), "run", signal.SIGINT, 130),
    ):
        begun = Begun(exgrpo, run)
        begun.wait_for(waits_for)
        os.kill(begun.pids()[who], how)
        assert begun.parent.wait(60) == code
        said = begun.end()
        last = said.splitlines()[-1]
        if code == 1:
            what = {"sample": "sampling", "train": "training"}[who]
            assert last.startswith(f"exgrpo: the process for {what} was ended by signal 9"), said
        words = {130: "interrupted", 143: "terminated"}
        if code in words:
            assert said.count("what was finished is kept") == 1
            assert last == LINE.format(words[code])
        assert "Traceback" not in said
        assert not run.is_locked()
    begun = Begun(exgrpo, run)
    assert begun.parent.wait(120) == 0, begun.end()
    assert run.report.exists()
    assert_same(run, by_hand)


@pytest.mark.parametrize(
    ("side", "device"), [("train", "train.device"), ("sample", "score.device")]
)
def test_a_side_that_fails_ends_the_other(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path, side: str, device: str
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, *recipe(guesser, f"{device}=mps"))
    begun = Begun(exgrpo, run)
    assert begun.parent.wait(60) == 2
    said = begun.end()
    assert said.count("exgrpo: ") == 1
    assert said.splitlines()[-1].startswith("exgrpo: ")
    assert "mps" in said.splitlines()[-1]


def test_processes_of_their_own(
    exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path
) -> None:
    """Really started, on the last step of a run."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(by_hand.root, run.root)
    back_to(run, STEPS - 1)
    done = exgrpo("run", run.root)
    assert "loop.lag: sampling and training at the same time, 1 threads each" in done.stderr
    assert_same(run, by_hand)


@pytest.mark.vllm
def test_no_process_of_vllm_outlives_a_killed_run(
    exgrpo: Exgrpo, guesser: Path, by_hand: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    child = exgrpo.start("run", run.root, *recipe(guesser), "--engine", "vllm", session=True)
    deadline = time.monotonic() + 300
    trained = run.stage_metrics(0, "time-train")
    while not (trained.exists() and any(run.rollouts(1).glob("part-*.parquet"))):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    below = psutil.Process(child.pid).children(recursive=True)
    assert len(below) > 4  # both sides, vLLM, what verifies
    child.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    assert set(parts(run.rollouts(1))["policy"]) == {step_name(0)}
    assert run.read_metrics()[0]["train/sampling_logp_difference_max"] < 1e-3
