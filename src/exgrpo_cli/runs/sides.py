"""The sides of a run: one samples, one trains, each as soon as what the other makes is there.

With a lag both are at work at the same time, in processes of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from exgrpo_cli.engines import engine_count, resolve_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.experience.plan import all_retired
from exgrpo_cli.machine import core_shares, cores, end_groups, end_with_parent, gpus
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import LOCK_VARIABLE, RunDir
from exgrpo_cli.runs.evaluations import evaluate_due, sets_due
from exgrpo_cli.runs.iteration import sample_step, step_line, train_step
from exgrpo_cli.runs.session import Session
from exgrpo_cli.runs.state import describe_step, due_stage
from exgrpo_cli.step import Step

Side = Literal["sample", "train"]

_POLL_SECONDS = 0.1
_SAID_SECONDS = 60.0
_END_SECONDS = 15.0


def run_side(side: Side, run: RunDir, recipe: Recipe, log: Log, tick: Callable[[], None]) -> None:
    """Do one side of a run to its end; ``tick`` is called after each step that was trained."""
    if side == "train":
        _train(run, recipe, log, tick)
        return
    with Session(run, recipe, log) as session:
        _sample(session)


def _sample(session: Session) -> None:
    """Sample each step by its policy, and then evaluate that where it is due: it is loaded."""
    run, recipe, log = session.run, session.recipe, session.log
    end, number = recipe.loop.steps, 0
    while True:
        step, began = Step.of(run, number).lagged(recipe.loop.lag), time.monotonic()
        policy = number - step.lag
        if policy > end:
            break

        def policy_is_there(policy: int = policy) -> bool:
            return policy == 0 or run.policy(policy).is_dir()

        if number < end and not step.next_policy.is_dir():
            _wait(policy_is_there, f"{run.policy(policy)}, which samples step {number}", log)
            curated = sample_step(session, step)
            if curated is None:
                end = number
            else:
                log(step_line(number, curated))
                session.iterations.append(time.monotonic() - began)
        if sets_due(run, recipe, policy):
            _wait(policy_is_there, f"{run.policy(policy)}, to evaluate it", log)
            evaluate_due(session, policy)
        number += 1


def _train(run: RunDir, recipe: Recipe, log: Log, tick: Callable[[], None]) -> None:
    for number in range(recipe.loop.steps):
        step = Step.of(run, number)

        def is_sampled(number: int = number) -> bool:
            return (
                run.plan(number + 1).exists()
                and due_stage(describe_step(run, number, recipe, deep=False)) == "train"
            )

        if step.next_policy.is_dir():  # but were its metrics recorded?
            train_step(recipe, step, log)
            continue
        if all_retired(run, number):
            break
        _wait(is_sampled, f"step {number} to be sampled", log)
        log(step_line(number, train_step(recipe, step, log)))
        tick()


def _wait(there: Callable[[], bool], what: str, log: Log) -> None:
    began, said = time.monotonic(), False
    while not there():
        if not said and time.monotonic() - began > _SAID_SECONDS:
            said = True
            log(f"waiting for {what}")
        time.sleep(_POLL_SECONDS)


# --- both at once ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """What of this machine each side gets."""

    words: str
    sample: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the side that samples."""
    train: Mapping[str, str] = field(default_factory=dict)


def split_devices(recipe: Recipe) -> Shares:
    """Share this machine's GPUs out between sampling and training, or its cores.

    Sampling gets as many GPUs as its engines take (``rollout.processes`` times
    ``rollout.tensor_parallel``, or ``score.processes``), training ``train.processes``. Both see all
    where the recipe names a device (``cuda:1``), or where ``rollout.gpu_memory_utilization`` leaves
    half of each GPU.
    """
    rollout, score, train = recipe.rollout, recipe.score, recipe.train
    kind, there = resolve_engine(rollout.engine), gpus()
    sampling = score.processes if score.enabled and score.device != "cpu" else 0
    if kind == "vllm":
        sampling = max(sampling, engine_count(recipe) * rollout.tensor_parallel)
    elif kind == "transformers" and rollout.device != "cpu":
        sampling = max(sampling, engine_count(recipe))
    training = train.processes if train.device != "cpu" else 0
    if not there or not sampling + training:
        first, second = core_shares(2)
        words = f"{first['OMP_NUM_THREADS']} threads each, on {len(cores())} cores"
        return Shares(words, first, second)
    if any(device.startswith("cuda:") for device in (rollout.device, score.device, train.device)):
        return Shares("on the devices that the recipe names")
    if len(there) >= sampling + training:
        first, second = (
            {"CUDA_VISIBLE_DEVICES": ",".join(part)}
            for part in (there[:sampling], there[sampling : sampling + training])
        )
        words = f"GPUs {', '.join(there[:sampling]) or 'none'} and {second['CUDA_VISIBLE_DEVICES']}"
        return Shares(words, first, second)
    if len(there) >= max(sampling, training) and rollout.gpu_memory_utilization <= 0.5:
        return Shares(f"both on GPU {', '.join(there)}")
    raise InputError(
        f"loop.lag = {recipe.loop.lag}: sampling takes {sampling} GPUs and training {training}, and"
        f" {len(there)} are here; lower rollout.processes, score.processes or train.processes, or"
        " let them share: rollout.gpu_memory_utilization = 0.5"
    )


@dataclass
class _Process:
    """A side at work."""

    side: Side
    process: subprocess.Popen[bytes]
    said: bytes = b""
    """Half a line."""
    error: str = ""
    """Its last line that was an error of ours."""

    def lines(self) -> Iterator[str]:
        """The lines that it has said since."""
        assert self.process.stderr is not None
        with suppress(BlockingIOError):
            while found := os.read(self.process.stderr.fileno(), 65536):
                *whole, self.said = (self.said + found).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace").rstrip().rpartition("\r")[2]

    def relay(self, log: Log) -> None:
        """Say what it said, but for its error: that is raised by :meth:`check`."""
        for line in self.lines():
            if line.startswith("exgrpo: "):
                self.error = line.removeprefix("exgrpo: ")
            else:
                log(line)

    def check(self) -> None:
        """Refuse that it has ended badly."""
        code = self.process.returncode
        if not code:
            return
        what = {"sample": "sampling", "train": "training"}[self.side]
        if code < 0 or code > 128:
            raise StageError(
                f"the process for {what} was ended by signal {abs(code) % 128} (out of memory?);"
                " what was finished is kept, the same command goes on"
            )
        words = self.error or f"the process for {what} ended with exit code {code}"
        raise InputError(words) if code == 2 else StageError(words)


def side_by_side(run: RunDir, shares: Shares, log: Log, tick: Callable[[], None]) -> None:
    """Do both sides of a run at the same time, each in a process of its own, to their ends.

    Where one ends badly, so does the other. Neither outlives this process.
    """
    log(f"loop.lag: sampling and training at the same time, {shares.words}")
    started: list[_Process] = []
    try:
        started.append(_Process("sample", _start(run, "sample", shares.sample)))
        started.append(_Process("train", _start(run, "train", shares.train)))
        ended = [False]
        while not all(ended):
            time.sleep(_POLL_SECONDS)
            ended = [one.process.poll() is not None for one in started]
            for one in started:  # before it is asked how it ended: all that it said is there by now
                one.relay(log)
            for one in started:
                one.check()
            tick()
    finally:
        end_groups([one.process for one in started], _END_SECONDS)


def _start(run: RunDir, side: Side, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    arguments = (str(os.getpid()), "run", str(run.root), "--only", side)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "exgrpo_cli.runs.sides", *arguments],
        env=os.environ | dict(variables) | {LOCK_VARIABLE: str(run.root.resolve())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        close_fds=False,  # should we be killed, what it has started may go on, under our lock
        process_group=0,  # a Ctrl-C is for the parent, which ends us
    )
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return process


def main() -> None:
    """``python -m exgrpo_cli.runs.sides PARENT_PID ARGUMENT…``: the command, as long as its parent
    lives."""
    end_with_parent(int(sys.argv[1]), number=signal.SIGTERM)  # in order, with what it has started
    del sys.argv[1]
    from exgrpo_cli.__main__ import main as command

    command()


if __name__ == "__main__":
    main()
