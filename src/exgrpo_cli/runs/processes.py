"""Stages in processes of their own, on several GPUs of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from exgrpo_cli.errors import StageError
from exgrpo_cli.machine import core_share, end_descendants, process_environments
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import LOCK_VARIABLE, RunDir
from exgrpo_cli.step import Result, Step

_END_SECONDS = 10.0


def score_in_processes(run: RunDir, step: Step, recipe: Recipe) -> Result:
    """The score stage in ``score.processes`` processes of this machine, a shard each; where one
    fails, the parts that are done stay.

    The result has the sums of what they count, and the seconds of the slowest.
    """
    count = recipe.score.processes
    command = [sys.executable, "-m", "exgrpo_cli", "score", str(run.root)]
    command += ["--step", str(step.number)]
    started: list[subprocess.Popen[str]] = []
    results: list[dict[str, Any]] = []
    try:
        for number, variables in enumerate(process_environments(count)):
            started.append(
                subprocess.Popen(
                    [*command, "--shard", f"{number}/{count}", "--json"],
                    env=os.environ | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for number, process in enumerate(started):
            out, said = process.communicate()
            if process.returncode != 0:
                raise StageError(
                    f"score step {step.number} failed in process {number + 1} of {count}:"
                    f" {_why_failed(said.splitlines())}"
                )
            results.append(json.loads(out))
    except BaseException:
        _end(started)
        raise
    counts = ("done", "skipped", "rows", "candidates", "tokens")
    total = {name: sum(result[name] for result in results) for name in counts}
    return Result(
        total.pop("done"),
        total.pop("skipped"),
        metrics=total | {"seconds": max(result["seconds"] for result in results)},
        compute_seconds=max(result["compute_seconds"] for result in results),
    )


def train_in_processes(run: RunDir, step: Step, recipe: Recipe) -> Result:
    """The train stage in ``train.processes`` processes of this machine, by torchrun."""
    from exgrpo_cli.training.trainer_state import read_trainer

    count = recipe.train.processes
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(count), "-m", "exgrpo_cli"),
        *("train", str(run.root), "--step", str(step.number)),
    ]
    threads = os.environ.get("OMP_NUM_THREADS") or str(core_share(count))
    with subprocess.Popen(
        command,
        env=os.environ | {LOCK_VARIABLE: str(run.root.resolve()), "OMP_NUM_THREADS": threads},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        close_fds=False,  # should we be killed, it goes on, under our lock
    ) as process:
        assert process.stderr is not None
        try:
            lines = [line.rstrip() for line in process.stderr]
        except BaseException:  # not waited for: a step of training is done whole or not at all
            _end([process])
            raise
    if process.returncode != 0:
        raise StageError(
            f"train step {step.number} failed in {count} processes: {_why_failed(lines)}"
        )
    metrics = read_trainer(step.next_trainer)["metrics"]
    own = [line for line in lines if line.startswith(("train step", "warning: "))]
    skipped = bool(metrics.get("train/skipped_updates"))
    notes = own if skipped else [line for line in own if line.startswith("warning: ")]
    rate = metrics.get("train/tokens_per_second")
    return Result(
        done=1,
        metrics=metrics,
        notes=tuple(notes),
        compute_seconds=metrics["train/tokens"] / rate if rate else None,
    )


def _end(started: Sequence[subprocess.Popen[str]]) -> None:
    """End processes that are at work, with all that they have started."""
    for process in started:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
    if any(process.poll() is None for process in started):
        end_descendants()


def _why_failed(lines: Sequence[str]) -> str:
    """The reason in what torchrun and its processes said: the signal that ended the first one to
    fail (others only miss it), else the first error of our own, else the last line."""
    ranks = [line.split(":", 1)[1].strip() for line in lines if line.startswith("  rank ")]
    ends = [line.split(":", 1)[1].strip() for line in lines if line.startswith("  exitcode ")]
    if ranks and ends and ends[-1].startswith("-"):  # torchrun names the first failure last
        return f"process {ranks[-1]} was ended, exit code {ends[-1]}; out of memory?"
    for line in lines:
        if line.startswith("exgrpo: "):
            return line.removeprefix("exgrpo: ")
    return next((line for line in reversed(lines) if line.strip("= -")), "nothing was said")
