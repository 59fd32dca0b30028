"""Kills, full disks and closed streams: a run goes on, and is what it would have been.

What takes longer, by hand: ``make soak``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import soak
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.training.trainer_state import prune_trainers
from soak import STEPS, Process, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("world"), seed=1)


@pytest.fixture
def run(world: World) -> Iterator[RunDir]:
    """A finished run."""
    copy = world.new()
    shutil.copytree(world.plain, copy)
    yield RunDir(copy)
    shutil.rmtree(copy)


# --- a minute of what the soak does ---------------------------------------------------------------


def test_before_calls_on_files(world: World) -> None:
    soak.points(world, 12, chance=0.1)
    assert world.kills["points"] > 5


def test_at_random_times(world: World) -> None:
    soak.times(world, 4)


def test_shards(world: World) -> None:
    soak.shards(world, 8)


def test_going_back(world: World) -> None:
    soak.back(world, 4, chance=0.07)
    assert world.kills["back"] > 2


# --- what a kill at a certain point once broke ----------------------------------------------------


def test_a_trainer_state_that_was_half_removed(world: World, run: RunDir) -> None:
    run.trainer(STEPS - 1).mkdir()
    world.succeed("run", run.root)
    run.trainer(STEPS - 1).rmdir()
    world.compare(run.root)


def test_trainer_states_that_were_put_aside_go_with_the_next(world: World, run: RunDir) -> None:
    left = run.root / "trainer" / ".step-00002.abcdefgh.tmp"
    other = run.root / "trainer" / ".step-00009.abcdefgh.tmp"
    for folder in (left, other):
        shutil.copytree(run.trainer(STEPS), folder)
    prune_trainers(run.trainer(STEPS), keep=1)
    assert not left.exists()
    assert other.exists()  # of a later step: somebody may be writing it
    assert run.trainer(STEPS).is_dir()


@pytest.mark.parametrize("lost", ["evaluate-held", "train", "time-train", None])
def test_metrics_that_were_not_recorded(world: World, run: RunDir, lost: str | None) -> None:
    """Each of a run's last, which no later step brings in."""
    if lost is not None:
        step = STEPS if lost == "evaluate-held" else STEPS - 1
        run.stage_metrics(step, lost).unlink()
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:-2]))
    world.succeed("run", run.root)
    world.compare(run.root)
    if lost == "time-train":
        times = json.loads(run.stage_metrics(STEPS - 1, lost).read_text())
        assert times["time/train"] > 0


def test_what_killed_writers_left_is_removed_once_it_is_old(world: World, run: RunDir) -> None:
    names = [
        ".problems.parquet.abcdefgh.tmp", "policy/.step-00002.abcdefgh.tmp/model.safetensors",
        "rollouts/step-00001/.part-00000-of-00003.parquet.00ff.0123456789ab.rows",
        "evaluations/.held.abcdefgh.tmp/held.parquet",
    ]  # fmt: skip
    for name in names:
        (run.root / name).parent.mkdir(exist_ok=True)
        (run.root / name).write_text("half")
    world.succeed("run", run.root)
    assert all((run.root / name).exists() for name in names)  # others may be at work on them
    world.sweep(run.root)


def test_training_again_forgets_what_was_there_first(world: World, run: RunDir) -> None:
    """Else a kill leaves a policy beside another policy's optimizer state."""
    last, before = run.trainer(STEPS), run.trainer(STEPS - 1)
    shutil.copytree(last, before)  # stands for the one that was pruned
    state = before / "trainer.json"
    state.write_text(state.read_text().replace(f'"step": {STEPS}', f'"step": {STEPS - 1}'))
    files = [run.policy(STEPS) / "model.safetensors", last / "optimizer.safetensors"]
    old = [file.read_bytes() for file in files]
    deadly = soak.Deadly(world.log(run.root).with_suffix(".points"), chance=0.4)
    words = ("train", "--step", STEPS - 1, "--force", "--lr", 0.5, "--set", "train.keep=9")
    found = set()
    while soak.die(world, "train", run.root, deadly, *words):
        found.add(tuple(
            "none" if not file.exists() else "old" if file.read_bytes() == was else "new"
            for file, was in zip(files, old, strict=True)
        ))  # fmt: skip
    assert ("none", "old") in found
    assert found <= {("old", "old"), ("new", "new"), *(("none", x) for x in ("old", "none", "new"))}
    assert all(file.read_bytes() != was for file, was in zip(files, old, strict=True))


# --- going back -----------------------------------------------------------------------------------


def refused(world: World, run: Path, *words: object) -> str:
    process = Process([words[0], run, *words[1:]], world.log(run))
    assert process.wait() == 2, process.said()
    return process.said()


def test_a_trained_step_is_sampled_again_only_where_told(world: World, run: RunDir) -> None:
    again = ("rollout", "--step", STEPS - 1, "--force")
    assert "--discard-later" in refused(world, run.root, *again)
    world.compare(run.root)
    # The state of the optimizer that the step began with was removed (train.keep = 1).
    assert "cannot be trained again" in refused(world, run.root, *again, "--discard-later")
    world.compare(run.root)


# --- policies that were removed -------------------------------------------------------------------


def test_a_run_goes_on_without_policies_that_were_removed(world: World, run: RunDir) -> None:
    gone = [step for step in run.steps("policy") if run.is_removed(step)]
    assert 1 in gone
    assert not {STEPS - 1, STEPS} & set(gone)
    assert json.loads(world.succeed("status", run.root, "--json"))["removed_policies"] == gone
    assert "policies removed, of steps 1" in world.succeed("status", run.root)
    assert "was trained and then removed" in world.succeed("train", run.root, "--step", 0)
    for words in (("rollout", "--step", 1), ("curate", "--rebuild"), ("run",)):
        world.succeed(words[0], run.root, *words[1:])
    world.compare(run.root)


def test_who_needs_a_removed_policy_is_told_how_it_is_made_again(world: World, run: RunDir) -> None:
    later = run.policy(3) / "model.safetensors"
    weights = later.read_bytes()
    mend = f"to make it again, run: exgrpo train {run.root} --step 0 --force"
    for words in (("evaluate", "--step", 1), ("rollout", "--step", 1, "--force", "--discard-later"),
                  ("train", "--step", 1, "--force"), ("score", "--step", 1, "--force"),
                  ("merge", "--step", 1)):  # fmt: skip
        said = refused(world, run.root, *words)
        line = f"exgrpo: {run.policy(1)}: removed to save disk (train.keep_policies); {mend}\n"
        assert said == line, words
    for step in range(3):
        world.succeed("train", run.root, "--step", step, "--force", "--set", "train.keep=9")
    world.succeed("evaluate", run.root, "--step", 1)
    assert later.read_bytes() == weights


# --- going on from another run --------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(world: World) -> Path:
    """A finished run that has all its policies."""
    path = world.new()
    world.succeed("run", path, *world.recipe, *soak.KEEP_ALL)
    return path


def test_a_fork_with_the_same_recipe_is_what_the_run_became(world: World, whole: Path) -> None:
    """However often it is killed while it is made."""
    fork = world.new()
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    deadly = soak.Deadly(world.log(fork).with_suffix(".points"), chance=0.05)
    words = ("init", "--from", whole, "--step", 2)
    while soak.die(world, "fork", fork, deadly, *words):
        assert not fork.exists() or RunDir(fork).origin() is not None
    assert world.kills["fork"] > 2
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
    linked = "rollouts/step-00001/part-00000-of-00003.parquet"
    assert (fork / linked).samefile(whole / linked)
    assert f"goes on from step 2 of {whole}" in world.succeed("status", fork)
    again = refused(world, fork, *words[:-1], 3)
    assert f"{fork}: is there already, and goes on from step 2 of {whole}; give" in again
    world.succeed("run", fork, *words[1:])
    assert not list(fork.parent.glob(f".{fork.name}.*"))
    found = [line for line in soak.differences(whole, fork, world.compared)
             if "time/" not in line and "/time-" not in line]  # fmt: skip
    without = ("policy/step-00001", "trainer/step-00001", "origin", "provenance", "report")
    assert [line for line in found if not line.startswith(without)] == []
    said = refused(world, fork, "evaluate", "--step", 1)
    assert said.endswith(f"lies in {whole}, from which this run goes on\n")


def test_a_fork_with_another_recipe_and_a_fresh_optimizer(world: World, whole: Path) -> None:
    fork, other = RunDir(world.new()), world.folder / "other.toml"
    other.write_text("[loop]\nsteps = 3\n")  # names neither model nor problems
    sets = [word for one in soak.SETTINGS if "loop" not in one for word in ("--set", one)]
    words = ("--from", whole, "--step", 2, "--fresh-optimizer", "--recipe", other, *sets)
    world.succeed("run", fork.root, *words, "--set", "train.learning_rate=1e-4")
    made, was = (json.loads((run.trainer(3) / "trainer.json").read_text())["updates"]
                 for run in (fork, RunDir(whole)))  # fmt: skip
    assert 0 < made < was
    assert fork.problems.read_bytes() == RunDir(whole).problems.read_bytes()
    assert fork.steps("policy") == [1, 2, 3]


def test_from_where_no_run_can_go_on(world: World, whole: Path, run: RunDir) -> None:
    fork = world.new()
    for words, said in (
        (("--from", whole, "--step", 9), f"{whole}: has no policy of step 9; the newest is of 4"),
        (("--from", whole), f"--from {whole}: give the step to go on from: --step N"),
        (("--step", 2), "--step and --fresh-optimizer say how to go on from another run: --from"),
        (("--from", whole / "no", "--step", 2), f"{whole}/no: no such run directory"),
        (("--from", run.root, "--step", 1),
         f"{run.policy(1)}: removed to save disk (train.keep_policies); whole are those of"),
        (("--from", run.root, "--step", 3), f"{run.trainer(3)}: the optimizer's state of step 3"),
        (("--from", whole, "--step", 2, "--set", "lora.enabled=true"),
         f"{fork}: lora.enabled was False and cannot become True in this run"),
    ):  # fmt: skip
        line = refused(world, fork, "run", *words)
        assert line.count("\n") == 1, line
        assert line.startswith(f"exgrpo: {said}"), line
        assert not fork.exists()


# --- two at once ----------------------------------------------------------------------------------


def test_two_runs_on_one_new_folder(world: World) -> None:
    """The one that fails leaves the other's alone, whether it comes first or second."""
    bad = [*world.recipe, "--problems", str(world.folder / "none.jsonl")]
    for number in range(4):
        place = world.new()
        words = [["init", place, *one] for one in (bad, world.recipe, world.recipe, bad)]
        both = [Process(one, place.with_name(f"{place.name}-{i}.log"))
                for i, one in enumerate(words[number % 2 :][:3])]  # fmt: skip
        codes = [one.wait() for one in both]
        said = [one.said() for one in both]
        good = [c for c, one in zip(codes, both, strict=True) if "none.jsonl" not in str(one.words)]
        assert set(codes) <= {0, 2}, said
        for code, text in zip(codes, said, strict=True):
            assert "Traceback" not in text
            assert code == 0 or "another exgrpo run" in text or "none.jsonl" in text, text
        if 0 in good:
            assert (place / "recipe.toml").exists()
            assert (place / "problems.parquet").exists()
        world.succeed("init", place, *world.recipe)


def test_a_lock_that_was_taken_back_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one fails and removes the new run while the second one waits for its lock."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    first = run.locked()
    first.__enter__()

    def take_back(_: float) -> None:
        shutil.rmtree(run.root)
        first.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", take_back)
    with run.locked():
        assert run.is_locked()
    assert not run.is_locked()


# --- full disks and closed streams ----------------------------------------------------------------


def test_a_file_that_cannot_grow_is_named_and_the_run_goes_on(world: World) -> None:
    """As with ``ulimit -f``: the same error as a full disk's."""
    place = world.new()
    stopped = set()
    for kilobytes in (2, 3, 4, 6, 8, 12, 20, 32, 48, 64, 96):
        log = place.with_name(f"{place.name}-{kilobytes}.log")
        process = Process(["run", place, *world.recipe], log, limit=1024 * kilobytes)
        if process.wait() == 0:
            break
        assert process.wait() == 1, process.said()
        last = process.said().splitlines()[-1]
        assert last.startswith(f"exgrpo: {place}/"), process.said()
        assert os.strerror(errno.EFBIG) in last
        stopped.add(last.removeprefix(f"exgrpo: {place}/").split("/")[0].split(":")[0])
        assert not soak.leftovers(place)
        world.look(place)
    assert "trainer" in stopped
    assert len(stopped) > 1
    world.succeed("run", place, *world.recipe)
    world.compare(place)


@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_closed_and_full_streams_end_no_run(world: World, streams: str) -> None:
    """A real process: what Python makes of its streams it makes as it starts."""
    place = world.new()
    words = [sys.executable, "-m", "exgrpo_cli", "run", str(place), *world.recipe]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(["sh", "-c", f'exec "$@" {streams}', "sh", *words], env=environment, timeout=300)
    world.compare(place)
