"""What `exgrpo status` says of runs that are whole, half made, killed, shared and damaged."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli import cli, tables
from exgrpo_cli.inspect.status import numbers, shards
from exgrpo_cli.rundir import RunDir
from made_run import make_metrics, make_run, make_tables, write
from making import rollout_row, settings, small_run, verdict_row

ROOT = Path(__file__).parents[1]
Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line in this process: what it prints; its exit code must be ``code``."""
    monkeypatch.chdir(ROOT)

    def run(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        done = capsys.readouterr()
        assert (ended.value.code or 0) == code, done.err
        return done.out if code == 0 else done.err

    return run


def wide_step(run: RunDir, step: int, parts: int, have: dict[str, list[int]]) -> None:
    """A planned step of 2 questions a part, with these parts of rollouts, verdicts and scores."""
    fresh = {"step": step, "role": "fresh", "samples": 2}
    names = [f"q{i:02d}" for i in range(2 * parts)]
    write("plan", run.plan(step), [{**fresh, "problem_id": name} for name in names])
    for i in range(parts):
        rows = [
            rollout_row(step, problem, sample, "1", entropies=[0.25] * 2)
            for problem in names[2 * i : 2 * i + 2]
            for sample in range(2)
        ]
        name = tables.part_name(i, parts)
        if i in have.get("rollouts", []):
            write("rollouts", run.rollouts(step) / name, rows)
        if i in have.get("verdicts", []):
            write(
                "verdicts",
                run.verdicts(step) / name,
                [verdict_row(r["rollout_id"], True) for r in rows],
            )
        if i in have.get("scores", []):
            scores = [{**row, "policy": f"step-{step:05d}"} for row in rows]
            write("scores", run.scores(step) / name, scores)


@pytest.fixture
def shared(tmp_path: Path) -> RunDir:
    """A run whose step 0 an array of tasks has half done: 13 of 16 parts are sampled."""
    run = RunDir(tmp_path / "a run")
    tables.write_text(run.recipe, "[rollout]\nquestions_per_part = 2\n[loop]\nsteps = 9\n")
    write("problems", run.problems, [])
    done = [i for i in range(16) if i not in (3, 7, 11)]
    wide_step(run, 0, 16, {"rollouts": done, "verdicts": done[:6], "scores": []})
    return run


def test_an_arrays_missing_parts_shards_and_the_line_that_sends_them_again(
    shared: RunDir, call: Call
) -> None:
    said = call("status", shared.root)
    root = shlex.quote(str(shared.root))
    assert "rollout  13/16 parts, missing 3 7 11; the last " in said
    line = f"--array=3,7,11 recipes/slurm/stage.sbatch rollout {root} 0 16\n"
    assert f"shards 3,7,11 of 16: sbatch $GPU_OPTIONS {line}" in said
    assert 'first: GPU_OPTIONS="--partition=gpu --gres=gpu:1", as your cluster has it' in said
    assert "verify   6/16 parts, missing 3 7-15" in said
    assert "sbatch $CPU_OPTIONS --array=8-10,12-15 " in said  # the others have no rollouts yet
    assert f"next: exgrpo rollout {root} --step 0\n" in said
    assert f"all that is left: exgrpo run {root}" in said
    assert "shards 3 of 4: sbatch $GPU_OPTIONS --array=3 " in call(
        "status", shared.root, "--tasks", 4
    )


def test_the_sbatch_lines_have_the_options_of_the_last_submit(
    shared: RunDir, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPU_OPTIONS", raising=False)
    monkeypatch.delenv("CPU_OPTIONS", raising=False)
    kept = "GPU_OPTIONS=--partition=a100 --gres=gpu:4\nCPU_OPTIONS=\n"
    tables.write_text(shared.root / "slurm" / "options", kept)
    said = call("status", shared.root)
    assert "sbatch --partition=a100 --gres=gpu:4 --array=3,7,11 recipes" in said
    assert "sbatch $CPU_OPTIONS --array=" in said
    assert "first: CPU_OPTIONS=" in said
    assert "first: GPU_OPTIONS=" not in said
    monkeypatch.setenv("GPU_OPTIONS", "--partition=now")
    assert "sbatch --partition=now --array=3,7,11 " in call("status", shared.root)


def test_the_shards_said_do_exactly_what_is_missing() -> None:
    for tasks in (1, 2, 3, 8, 16):
        missing = [3, 7, 11]
        named = shards(missing, tasks)
        done = {p for task in named for p in range(16) if tables.Shard(task, tasks).has(p)}
        assert set(missing) <= done
        for task in named:  # and each is needed
            assert any(tables.Shard(task, tasks).has(part) for part in missing)
    assert numbers([5, 0, 1, 2, 9, 8]) == "0-2,5,8-9"


def test_json_has_it_all(shared: RunDir, call: Call) -> None:
    found = json.loads(call("status", shared.root, "--json"))
    assert found["step"]["plan"] == {"questions": 32, "fresh": 32, "replay": 0}
    rollout, score = (found["step"]["stages"][name] for name in ("rollout", "score"))
    assert (rollout["done"], rollout["expected"], rollout["missing"]) == (13, 16, [3, 7, 11])
    assert not rollout["complete"]
    assert score["missing"] == list(range(16))
    assert (found["steps"], found["steps_planned"], found["at_work"]) == (0, 9, False)
    assert found["replay_started_step"] is None
    assert found["next"] == {
        "step": 0,
        "stage": "rollout",
        "command": f"exgrpo rollout '{shared.root}' --step 0",
    }


def test_temporary_files_are_work_while_they_are_young(shared: RunDir, call: Call) -> None:
    with tables.atomic_path(shared.rollouts(0) / tables.part_name(3, 16)) as half:
        half.write_bytes(b"half")
        assert "; being made: 3;" in call("status", shared.root)
        hour = time.time() - 3600
        os.utime(half, (hour, hour))
        said = call("status", shared.root)
        assert "; left unfinished: 3;" in said
        assert "being made" not in said
        assert "missing 3 7 11" in said
        draft = half.with_name(f".{tables.part_name(7, 16)}.0123abcd.4567.rows")
        draft.write_bytes(b"rows that a task keeps")
        assert "; being made: 7; left unfinished: 3;" in call("status", shared.root)
        found = json.loads(call("status", shared.root, "--json"))
        assert found["step"]["stages"]["rollout"]["writing"] == [7]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[RunDir], None]]:
    """A process that holds a run's lock until the test ends."""
    children = []

    def hold(run: RunDir) -> None:
        code = (
            "import sys; from pathlib import Path; from exgrpo_cli.rundir import RunDir\n"
            "with RunDir(Path(sys.argv[1])).locked(): print('held', flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(run.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"

    yield hold
    for child in children:
        child.communicate()


def test_a_run_that_is_held_is_at_work(
    shared: RunDir, call: Call, holder: Callable[[RunDir], None]
) -> None:
    holder(shared)
    said = call("status", shared.root)
    assert "at work: an exgrpo run, curate or train holds this run" in said
    assert "next, once that has ended: exgrpo rollout" in said
    assert "sbatch" not in said  # that work is being done
    assert json.loads(call("status", shared.root, "--json"))["at_work"]


def test_looking_leaves_no_lock_and_no_file(shared: RunDir, call: Call) -> None:
    before = sorted(shared.root.rglob("*"))
    call("status", shared.root)
    assert sorted(shared.root.rglob("*")) == before
    with shared.locked():
        pass
    call("status", shared.root)
    with shared.locked():
        pass


def test_half_made_runs(call: Call, tmp_path: Path) -> None:
    def following(run: Path) -> str:
        return str(json.loads(call("status", run, "--json"))["next"]["command"])

    assert "no such run directory" in call("status", tmp_path / "none", code=2)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    assert "not a run directory" in call("status", tmp_path, code=2)
    assert following(run.root) == f"exgrpo init {run.root} --recipe RECIPE.toml"
    assert "next: exgrpo init" in call("status", run.root)
    tables.write_text(run.recipe, "seed = 1\n")
    assert following(run.root) == f"exgrpo init {run.root} --problems FILE"
    tables.write_text(run.recipe, '[problems]\npath = "data/arithmetic/train.jsonl"\n')
    assert following(run.root) == f"exgrpo init {run.root}"
    write("problems", run.problems, [])
    assert following(run.root) == f"exgrpo rollout {run.root} --step 0"
    assert "plan     not made yet" in call("status", run.root)
    run.policy(1).mkdir(parents=True)  # trained, but the curation came to no end
    assert following(run.root) == f"exgrpo curate {run.root} --step 0"
    tables.write_text(run.recipe, "seed = = 1\n")
    assert "recipe.toml: not valid TOML" in call("status", run.root, code=2)


def test_a_step_is_asked_for_and_gaps_behind_are_said(call: Call, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 0)
    tables.write_text(run.recipe, "seed = 0\n")
    make_metrics(run, 1)
    run.policy(1).mkdir(parents=True)
    (run.verdicts(0) / tables.part_name(1, 2)).unlink()
    tables.write_json(run.curation, {"replay_from": 1})
    wide_step(run, 1, 1, {"rollouts": [0], "verdicts": [0], "scores": [0]})
    said = call("status", run.root)
    assert "1 of 500 steps done, policy step-00001, replay since step 1" in said
    assert "step 0 is trained, but parts are missing: verify 1\n" in said
    assert f"next: exgrpo verify {run.root} --step 0" in said  # curate reads the whole log
    shutil.rmtree(run.rollouts(0))
    run.rollouts(0).mkdir()
    assert "missing: rollout 0-1, verify 1\n" in call("status", run.root)
    earlier = json.loads(call("status", run.root, "--step", 0, "--json"))
    assert earlier["step"]["stages"]["verify"]["missing"] == [1]
    assert earlier["step"]["stages"]["train"]["complete"]
    assert (earlier["next"]["step"], earlier["next"]["stage"]) == (0, "rollout")


def test_rollouts_thrown_away_are_named_with_their_repair(call: Call, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 0)
    tables.write_text(run.recipe, "seed = 0\n")
    run.policy(1).mkdir(parents=True)
    run.trainer(1).mkdir(parents=True)
    wide_step(run, 1, 1, {"rollouts": [0], "verdicts": [0], "scores": [0]})
    assert "mend:" not in call("status", run.root)
    shutil.rmtree(run.rollouts(0))
    said = call("status", run.root)
    assert "step 0 is trained, but parts are missing: rollout 0\n" in said  # as the plan has it
    assert f"mend: {run.rollouts(0)}: rollouts of a trained step are gone" in said
    assert f"exgrpo rollout {run.root} --step 0 (the same rows where the engine" in said
    assert f"next: exgrpo rollout {run.root} --step 0\n" in said


def test_a_lost_trainer_state_is_named_with_the_repair_that_works(
    call: Call, tmp_path: Path
) -> None:
    run = make_run(tmp_path, 3)
    wide_step(run, 3, 1, {"rollouts": [0], "verdicts": [0], "scores": [0]})
    write("plan", run.plan(4), [])
    write("curated", run.curated(3), [])
    assert f"exgrpo train {run.root} --step 0 --force, then 1 to 2" in call("status", run.root)
    run.trainer(2).mkdir(parents=True)
    again = f"exgrpo train {run.root} --step 2 --force"
    said = call("status", run.root)
    assert f"mend: {run.trainer(3)}: the trainer state of the newest policy is gone" in said
    assert f"restore it, or make it again: {again}\n" in said
    assert f"next: {again}\n" in said
    run.trainer(3).mkdir()
    said = call("status", run.root)
    assert "mend:" not in said
    assert f"next: exgrpo train {run.root} --step 3\n" in said


def test_what_data_holds_is_harmless_on_the_screen(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path, 2)
    rows = tables.read_table("problems", run.problems).to_dicts()
    write("problems", run.problems, [{**row, "source": "\x1b]0;x\x07\x9b1m"} for row in rows])
    said = call("status", run.root)
    assert "3 \\x1b]0;x\\x07\\x9b1m" in said


def test_finished_runs_say_so(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path, 4)
    shutil.copy(run.recipe, tmp_path / "kept.toml")
    write("plan", run.plan(4), [])
    run.trainer(4).mkdir(parents=True)
    assert "finished: every question is retired\nnext: exgrpo report" in call("status", run.root)
    text = "[loop]\nsteps = 4\n[evaluate]\nevery = 2\n[evaluate.problems]\nheldout = 'h.jsonl'\n"
    tables.write_text(run.recipe, text)
    said = call("status", run.root)
    assert "finished: all steps are trained\n" in said
    assert "evaluated on heldout: 4, missing 0 2\n" in said
    assert f"next: exgrpo report {run.root}" in said
    (run.evaluation(4, "heldout") / "summary.json").unlink()
    assert f"next: exgrpo evaluate {run.root} --step 4" in call("status", run.root)


def test_what_must_be_mended_is_said(shared: RunDir, call: Call) -> None:
    part = shared.rollouts(0) / tables.part_name(2, 16)
    part.write_bytes(part.read_bytes()[:100])
    shutil.copy(part, shared.verdicts(0) / tables.part_name(0, 3))
    said = call("status", shared.root)
    assert f"mend: {part}: damaged (no Parquet); remove it\n" in said
    assert "verdicts/step-00000: part parts of 3 and of 16 lie together" in said
    tables.write_text(shared.recipe, "[rollout]\nquestions_per_part = 4\n")
    assert "sampled in 16 parts, and the recipe now gives 8" in call("status", shared.root)
    shared.plan(0).write_bytes(b"")
    said = call("status", shared.root)
    assert "step-00000.parquet: the file is empty" in said
    assert "13/16 parts" in said  # the names still tell


def test_the_next_command_typed_again_and_again_ends_the_run(
    guesser: Path, tmp_path: Path, call: Call
) -> None:
    """From an empty directory's init to the last step, replay candidates among the work."""
    run = RunDir(tmp_path / "run")
    call("init", run.root, *small_run(guesser), *settings("curate.questions=4", "loop.steps=2"))
    typed = []
    while True:
        found: dict[str, Any] = json.loads(call("status", run.root, "--json"))
        if found["next"]["stage"] == "done":
            break
        typed.append(f"{found['next']['stage']} {found['next']['step']}")
        if typed[-1] == "score 1":
            assert found["step"]["stages"]["score"]["replay"]["expected"] == 1
        assert len(typed) == len(set(typed)), typed
        call(*shlex.split(found["next"]["command"])[1:])
    stages = ("rollout", "verify", "score", "curate", "train")
    assert typed == [f"{stage} {step}" for step in (0, 1) for stage in stages]
    assert found["replay_started_step"] == 1
    assert "2 of 2 steps done" in call("status", run.root)

    # A lost trainer state: the command that status names makes the same one again.
    kept = {path.name: path.read_bytes() for path in run.trainer(2).glob("*.safetensors")}
    assert kept
    shutil.rmtree(run.trainer(2))
    tables.write_text(run.recipe, run.recipe.read_text().replace("steps = 2", "steps = 3"))
    (fault,) = json.loads(call("status", run.root, "--json"))["faults"]
    call(*shlex.split(fault.split("make it again: exgrpo ")[1]))
    assert {path.name: path.read_bytes() for path in run.trainer(2).glob("*.safetensors")} == kept
    assert "mend:" not in call("status", run.root)


def test_nothing_heavy_is_imported(shared: RunDir) -> None:
    code = (
        "import sys\nfrom exgrpo_cli.cli import main\n"
        "try:\n    main(['status', sys.argv[1]])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", code, str(shared.root)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
