"""The run directory: names, and metrics that survive kills and repeats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.step import Step


def test_layout(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.plan(7) == tmp_path / "plan/step-00007.parquet"
    assert run.rollouts(7) == tmp_path / "rollouts/step-00007"
    assert run.policy(8) == tmp_path / "policy/step-00008"
    assert step_name(123456) == "step-123456"


def test_given_paths_win(tmp_path: Path) -> None:
    step = Step.of(RunDir(tmp_path), 3, rollouts=Path("loose"))
    assert step.rollouts == Path("loose")
    assert step.verdicts == tmp_path / "verdicts/step-00003"


def test_steps_ignore_strangers_and_half_written_files(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.mkdir()
    for name in ("step-00002.parquet", "step-00000.parquet", ".step-00009.parquet.x.tmp", "notes"):
        (plan / name).touch()
    run = RunDir(tmp_path)
    assert run.steps("plan") == [0, 2]


def test_policy_of_a_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.policy_path(0, "org/model") == "org/model"
    with pytest.raises(InputError, match=r"exgrpo train .* --step 2"):
        run.policy_path(3, "org/model")
    run.policy(3).mkdir(parents=True)
    assert run.policy_path(3, "org/model") == str(run.policy(3))


def test_metrics_are_a_line_a_step_whatever_happens(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.record(0, "curate", {"reward/mean": 0.25})
    run.record(0, "train", {"train/loss": float("nan")})
    run.record(1, "curate", {"reward/mean": 0.5})
    assert run.read_metrics() == [
        {"step": 0, "reward/mean": 0.25, "train/loss": None},
        {"step": 1, "reward/mean": 0.5},
    ]
    run.record(0, "train", {"train/loss": 1.5})  # a stage run again replaces its own numbers
    assert run.read_metrics()[0] == {"step": 0, "reward/mean": 0.25, "train/loss": 1.5}

    # Killed between the stage's file and metrics.jsonl: the next record brings the line back.
    (tmp_path / "metrics/step-00001/train.json").write_text(json.dumps({"train/loss": 2.0}))
    run.record(2, "curate", {"reward/mean": 0.75})
    assert [line.get("train/loss") for line in run.read_metrics()] == [1.5, 2.0, None]
    run.metrics.write_text("{half a line")
    with pytest.raises(InputError, match="line 1 is damaged"):
        run.read_metrics()
    run.record(2, "curate", {"reward/mean": 0.75})
    assert len(run.read_metrics()) == 3


def test_what_a_killed_run_has_started_keeps_its_lock(tmp_path: Path) -> None:
    program = (
        "import os, signal, subprocess, sys; from pathlib import Path;"
        "from exgrpo_cli.rundir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).locked():\n"
        "    child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "    print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = RunDir(tmp_path)
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    child = int(killed.stdout.readline())
    assert killed.wait(10) == -signal.SIGKILL
    assert run.is_locked()
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while run.is_locked() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not run.is_locked()
