"""The same stages driven by make and by SLURM's scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exgrpo_cli.rundir import RunDir

ROOT = Path(__file__).parents[1]
Exgrpo = Callable[..., subprocess.CompletedProcess[str]]

# Stands in for SLURM alone: runs a job's tasks at once, in the reverse of their order, with SLURM's
# variables, and refuses a job that depends on one that it has not seen.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
seen=$(dirname "$0")/jobs; touch "$seen"
array="" deps=""
while [[ $1 == -* ]]; do
  case $1 in
    --array=*) array=${1#--array=} ;;
    --dependency=afterok:*) deps=${1#--dependency=afterok:} ;;
  esac
  shift
done
for job in ${deps//:/ }; do grep -qx "$job" "$seen"; done
if [[ -n $array ]]; then
  first=${array%-*} last=${array#*-}
  for ((task = last; task >= first; task--)); do
    SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_MIN=$first \\
      SLURM_ARRAY_TASK_COUNT=$((last - first + 1)) bash "$@" >&2
  done
else
  bash "$@" >&2
fi
id=$((1000 + $(wc -l < "$seen"))); echo "$id" >> "$seen"; echo "$id;cluster"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """`exgrpo` and `sbatch` on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        ("sbatch", SBATCH),
        ("exgrpo", f'#!/bin/sh\nexec {sys.executable} -m exgrpo_cli "$@"\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_make_then_slurm(
    exgrpo: Exgrpo, demo_model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = RunDir(tmp_path / "run")
    exgrpo(
        "init", run.root, "--recipe", "recipes/demo.toml", "--model", demo_model,
        "--set", "curate.questions=6", "--set", "rollout.samples=4",
        "--set", "rollout.questions_per_part=3", "--set", "rollout.engine=transformers",
        "--set", "verify.workers=1",
    )  # fmt: skip
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
