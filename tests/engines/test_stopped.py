"""SIGTERM while the real vLLM samples: it ends in time, and the same command goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from polars.testing import assert_frame_equal

from exgrpo_cli.interrupts import LINE
from exgrpo_cli.rundir import RunDir
from making import parts, settings, small_run

Exgrpo = Callable[..., Any]
PARTS = 32  # more rows than vLLM takes at once


@pytest.mark.vllm
@pytest.mark.slow
def test_sigterm_while_vllm_samples(exgrpo: Exgrpo, guesser: Path, tmp_path: Path) -> None:
    """In ``rollout``, and in ``run`` when the engine has taken a second policy."""
    words = [*small_run(guesser), *settings(f"curate.questions={3 * PARTS}")]

    def stop(run: RunDir, step: int, *command: object) -> dict[Path, int]:
        """End it by SIGTERM in the middle of a step's rollouts; the parts that it leaves."""
        with (tmp_path / "said").open("w+") as said:
            child = exgrpo.start(*command, stderr=said.fileno(), session=True)
            deadline = time.monotonic() + 600
            while not any(run.rollouts(step).glob("part-*")):
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            below = psutil.Process(child.pid).children(recursive=True)
            assert len(below) >= 2  # vLLM's core and worker
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 128 + signal.SIGTERM
            _, alive = psutil.wait_procs(below, timeout=5)
            assert alive == []
            said.seek(0)
            assert said.read().splitlines()[-1] == LINE.format("terminated")
        assert not list(run.root.rglob("*.tmp"))
        kept = {part: part.stat().st_mtime_ns for part in run.rollouts(step).glob("part-*")}
        assert 0 < len(kept) < PARTS
        return kept

    run, other = RunDir(tmp_path / "run"), RunDir(tmp_path / "other")
    exgrpo("init", run.root, *words)
    rollout = ("rollout", run.root, "--engine", "vllm")
    kept = stop(run, 0, *rollout)
    exgrpo(*rollout)
    assert all(part.stat().st_mtime_ns == made for part, made in kept.items())
    stop(other, 1, "run", other.root, *words, "--engine", "vllm", "--steps", 2)
    assert other.policy(1).is_dir()
    assert_frame_equal(parts(run.rollouts(0)), parts(other.rollouts(0)))  # undisturbed
