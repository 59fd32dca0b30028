"""Stages in processes of their own, on several GPUs of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.engines.warm import return_memory
from exgrpo_cli.errors import StageError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import LOCK_VARIABLE, RunDir, step_name


def train_step(
    run: RunDir,
    step: int,
    recipe: Recipe,
    log: Log = quiet,
    *,
    policy: str | None = None,
    trainer: Path | None = None,
    out_policy: Path | None = None,
    out_trainer: Path | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """The train stage with a run directory's own files; its metrics are recorded there.

    Explicit paths stand in for the run's own.

    Raises:
        InputError: see :func:`exgrpo_cli.stages.train.train`.
    """
    from exgrpo_cli.experience.pool import replay_on
    from exgrpo_cli.models import check_tokenizer
    from exgrpo_cli.stages.train import train

    scores = run.scores(step)
    source = policy or run.policy_path(step, recipe.model.path)
    if not (out_policy or run.policy(step + 1)).exists():
        check_tokenizer(source)  # or only the next rollout would miss it
    result = train(
        rollouts=run.rollouts(step),
        verdicts=run.verdicts(step),
        scores=scores if scores.is_dir() else None,
        curated=run.curated(step),
        policy=source,
        trainer=trainer or (run.trainer(step) if step > 0 else None),
        out_policy=out_policy or run.policy(step + 1),
        out_trainer=out_trainer or run.trainer(step + 1),
        step=step,
        recipe=recipe,
        replay_started=replay_on(run, step),
        force=force,
        log=log,
    )
    kept = run.root / "metrics" / step_name(step) / "train.json"
    if not is_first_process():
        return result
    if "train/loss" in result and not (result.get("skipped") and kept.exists()):
        run.record(step, "train", {k: v for k, v in result.items() if k.startswith("train/")})
    return result


def score_in_processes(run: RunDir, step: int, recipe: Recipe) -> dict[str, Any]:
    """The score stage in ``score.processes`` processes of this machine, a shard each.

    Returns:
        The sums of what they count; ``seconds`` and ``compute_seconds`` of the slowest.

    Raises:
        StageError: a process failed; the parts that are done stay.
    """
    from exgrpo_cli.machine import process_environments

    count = recipe.score.processes
    return_memory()
    command = [sys.executable, "-m", "exgrpo_cli", "score", str(run.root), "--step", str(step)]
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
                    f"score step {step} failed in process {number + 1} of {count}:"
                    f" {_why_failed(said.splitlines())}"
                )
            results.append(json.loads(out))
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()
    longest = ("seconds", "compute_seconds")
    return {
        name: (max if name in longest else sum)(result[name] for result in results)
        for name in results[0]
    }


def train_in_processes(run: RunDir, step: int, recipe: Recipe, log: Log) -> dict[str, Any]:
    """:func:`train_step` in ``train.processes`` processes of this machine, by torchrun.

    Raises:
        StageError: a process failed.
    """
    done = run.policy(step + 1).is_dir()
    if not done:
        return_memory()  # that this process scored with
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(recipe.train.processes), "-m", "exgrpo_cli"),
            *("train", str(run.root), "--step", str(step)),
        ]
        variables = os.environ | {
            LOCK_VARIABLE: str(run.root.resolve()),
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // recipe.train.processes, 1))
            ),
        }
        with subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            close_fds=False,  # should we be killed, it goes on, under our lock
        ) as process:
            assert process.stderr is not None
            lines = [line.rstrip() for line in process.stderr]
        own = [line for line in lines if line.startswith(("train step", "warning: ", "exgrpo: "))]
        for line in own:
            log(line)
        if process.returncode != 0:
            raise StageError(
                f"train step {step} failed in {recipe.train.processes} processes:"
                f" {_why_failed(lines)}"
            )
    result = train_step(run, step, recipe)
    return result if done else {k: v for k, v in result.items() if k != "skipped"}


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
