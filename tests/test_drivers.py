"""The same stages driven by make and by SLURM's scripts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli import tables
from exgrpo_cli.rundir import RunDir
from making import settings, small_run

ROOT = Path(__file__).parents[1]
Exgrpo = Callable[..., Any]

# Stands in for exgrpo where only make's decisions matter: notes what it is told, makes the files
# that are missing as the stages do, and leaves others as they are.
RECORDER = """#!/usr/bin/env bash
set -euo pipefail
stage=$1 run=$2 step=$4
echo "$stage $step" >> "$run/calls"
declare -A folders=([rollout]=rollouts [verify]=verdicts [score]=scores)
name=$(printf step-%05d "$step") next=$(printf step-%05d $((step + 1)))
case $stage in
  curate) mkdir -p "$run/curated"; [[ -e $run/curated/$name.parquet ]] ||
    touch "$run/curated/$name.parquet" ;;
  train) # with AHEAD, only where the next step is sampled at the same time
    for ((i = 0; i < ${AHEAD:-0} && step < 2; i++)); do
      ! grep -qx "rollout $((step + 1))" "$run/calls" || break
      sleep 0.05
    done
    ((i < ${AHEAD:-1}))
    mkdir -p "$run/policy/$next" ;;
  *) mkdir -p "$run/${folders[$stage]}/$name"
    for part in 00000 00001 00002; do
      file=$run/${folders[$stage]}/$name/part-$part-of-00003.parquet
      [[ -e $file ]] || touch "$file"
    done ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    return run


@pytest.fixture
def make(tmp_path: Path, run: RunDir) -> Callable[..., list[str]]:
    """Makes so many steps; what it calls."""
    recorder = tmp_path / "exgrpo"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)

    def make(steps: int, **environment: str) -> list[str]:
        (run.root / "calls").unlink(missing_ok=True)
        words = ["-j2", "-f", "recipes/iterate.mk", f"RUN={run.root}", f"STEPS={steps}"]
        subprocess.run(
            ["make", *words, f"EXGRPO={recorder}"], cwd=ROOT, check=True, capture_output=True,
            env=os.environ | environment,
        )  # fmt: skip
        calls = run.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    return make


def test_make_does_only_what_is_missing(run: RunDir, make: Callable[..., list[str]]) -> None:

    def iteration(step: int) -> list[str]:
        return [f"{stage} {step}" for stage in ("rollout", "score", "verify", "curate", "train")]

    def ordered(calls: list[str]) -> list[str]:  # verify and score run side by side
        return sorted(
            calls,
            key=lambda call: (int(call.split()[1]), iteration(0).index(f"{call.split()[0]} 0")),
        )

    assert ordered(make(1)) == iteration(0)
    assert make(1) == []
    assert ordered(make(3)) == iteration(1) + iteration(2)
    assert make(3) == []
    part = run.scores(2) / "part-00001-of-00003.parquet"
    part.unlink()  # the verdicts and rollouts are whole, and are left alone
    assert make(3) == ["score 2", "curate 2", "train 2"]
    assert part.exists()
    assert make(3) == []
    part = run.rollouts(2) / "part-00002-of-00003.parquet"
    part.unlink()
    assert ordered(make(3)) == iteration(2)
    assert part.exists()
    assert make(3) == []


LAGGED = "[curate]\nquestions = 3\n\n[evaluate]\nevery = 2\n\n[loop]\nsteps = 3\nlag = {}\n"


def test_make_samples_ahead_by_the_recipes_lag(run: RunDir, make: Callable[..., list[str]]) -> None:
    run.recipe.write_text(LAGGED.format(1))
    calls = make(3, AHEAD="200")
    for step in (0, 1):
        assert calls.index(f"curate {step}") < calls.index(f"rollout {step + 1}")
    assert calls.index("train 0") < calls.index("rollout 2")
    assert len(calls) == 15
    assert make(3) == []


def test_submit_waits_for_what_each_job_reads(run: RunDir, tmp_path: Path) -> None:
    script = """#!/usr/bin/env bash
        for word; do case $word in
          --job-name=*) name=${word#*=} ;; --dependency=afterok:*) after=${word#*:} ;;
        esac; done
        echo "$name ${after:-}" >> "$(dirname "$0")/jobs"; echo "$name"
    """
    (tmp_path / "sbatch").write_text(script)
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EVALUATE": "2"}
    for lag in range(3):
        run.recipe.write_text(LAGGED.format(lag))
        (tmp_path / "jobs").unlink(missing_ok=True)
        command = ["recipes/slurm/submit.sh", str(run.root), "4", "4"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        lines = (tmp_path / "jobs").read_text().splitlines()
        jobs = (line.split(" ") for line in lines)
        after = {name: set(others.split(":")) - {""} for name, others in jobs}
        for step in range(4, 8):
            reads = {f"curate-{step - 1}", f"train-{step - lag - 1}"}
            assert after[f"rollout-{step}"] == reads & after.keys()
            assert after[f"train-{step}"] == {f"curate-{step}", f"train-{step - 1}"} & after.keys()
            assert after[f"curate-{step}"] == {f"verify-{step}", f"score-{step}"}
        assert after["evaluate-4"] == set()  # policy 4 is there
        assert [after[f"evaluate-{step}"] for step in (6, 8)] == [{"train-5"}, {"train-7"}]
        assert len(after) == 4 * 5 + 3


def test_what_was_sent_ahead_ends_in_peace_once_every_question_is_retired(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo("init", run.root, "--recipe", "recipes/demo.toml", "--model", guesser)
    tables.write_table("plan", tables.frame("plan", []), run.plan(1))
    run.policy(1).mkdir(parents=True)
    (run.root / "curated").mkdir()
    before = {path.name for path in run.root.iterdir()}
    for stage in ("rollout", "verify", "score", "curate", "train"):
        done = exgrpo(stage, run.root, "--step", 2, "--json")
        assert json.loads(done.stdout) == {"step": 2, "finished": True}
        assert "step 2: every question is retired; there is nothing left to do" in done.stderr
    assert {path.name for path in run.root.iterdir()} == before
    shutil.rmtree(run.policy(1))
    tables.write_table("plan", tables.frame("plan", []), run.plan(0))
    run.plan(1).unlink()
    make = ["make", "-f", "recipes/iterate.mk", f"RUN={run.root}", "STEPS=1"]
    subprocess.run(make, cwd=ROOT, env=environment, check=True, capture_output=True)
    subprocess.run(
        ["recipes/node.sh", str(run.root), "3", "1"], cwd=ROOT, env=environment, check=True
    )
    for kind in ("rollouts", "verdicts", "scores", "curated", "policy"):
        assert run.steps(kind) == []


def test_make_then_slurm(
    exgrpo: Exgrpo, guesser: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo(
        "init",
        run.root,
        *small_run(guesser),
        *settings("curate.questions=6"),
    )
    make = ["make", "-j2", "-f", "recipes/iterate.mk", f"RUN={run.root}", "STEPS=1"]
    subprocess.run(
        [*make, "ENGINE=transformers"], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    assert run.policy(1).is_dir()
    assert subprocess.run([*make, "-q"], cwd=ROOT, env=environment, check=False).returncode == 0

    done = subprocess.run(
        ["recipes/slurm/submit.sh", str(run.root), "1", "1", "2"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "step 1: rollout 1000, verify 1001, score 1002, curate 1003, train 1004" in done.stdout
    assert len(list(run.rollouts(1).glob("part-*-of-00002.parquet"))) == 2
    assert run.policy(2).is_dir()
    assert [line["step"] for line in run.read_metrics()] == [0, 1]


# Stands in for a stage: notes what it is told, and goes on until it is ended.
STAGE = """#!/usr/bin/env bash
echo "$* offline=${HF_HUB_OFFLINE:-no}" >> "$CALLS"
trap 'exit 143' TERM
sleep 60 & wait $!
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_near_its_time_limit_ends_its_stage_and_is_queued_again(
    tmp_path: Path, number: int
) -> None:
    calls, run = tmp_path / "calls", tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(f'seed = 0\n[model]\npath = "{tmp_path}"\n[loop]\n')
    for name, text in (("exgrpo", STAGE), ("scontrol", '#!/bin/sh\necho "$*" >> "$CALLS"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1", "CALLS": str(calls)}
    job = subprocess.Popen(
        ["bash", "recipes/slurm/stage.sbatch", "rollout", str(run), "3", "8"],
        cwd=ROOT,
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    deadline = time.monotonic() + 30
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(30) == 143
    stage = f"rollout {run} --step 3 --shard 1/8 offline=1"
    again = ["requeue 77"] if number == signal.SIGUSR1 else []  # but not after scancel
    assert calls.read_text().splitlines() == [stage, *again]
