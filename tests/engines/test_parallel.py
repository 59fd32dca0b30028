"""Several engines as one: the same rows, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli.engines import Request, Sampling, open_engine, open_engines
from exgrpo_cli.engines.parallel import split
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.machine import process_environments
from exgrpo_cli.recipe import Recipe, parse_recipe


def recipe(**rollout: object) -> Recipe:
    return parse_recipe({"rollout": {"engine": "transformers", **rollout}}, "test")


def requests(count: int) -> list[Request]:
    return [Request(i, [5 + i // 4 % 7, 6], 100 + i) for i in range(count)]


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 6))
def test_prompts_stay_together_and_shares_are_even(prompts: list[int], count: int) -> None:
    rows = [Request(i, [prompt], i) for i, prompt in enumerate(prompts)]
    shares = split(rows, count)
    assert len(shares) == count
    assert sorted(row.index for share in shares for row in share) == list(range(len(rows)))
    held = [{row.prompt_ids[0] for row in share} for share in shares]
    assert sum(map(len, held)) == len(set(prompts))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_rows_are_those_of_one_engine_and_a_lost_process_is_said(guesser: Path) -> None:
    sampling = Sampling(1.0, 12, entropies=True)
    alone = open_engine(recipe(), str(guesser))
    before = below()
    several = open_engines(recipe(processes=2), str(guesser))
    try:
        assert several.name == "transformers"
        for _ in range(2):
            one = {c.index: c for c in alone.generate(requests(24), sampling)}
            two = {c.index: c for c in several.generate(requests(24), sampling)}
            assert {i: c.token_ids for i, c in one.items()} == {
                i: c.token_ids for i, c in two.items()
            }
            for index, row in one.items():
                assert two[index].logprobs == pytest.approx(row.logprobs, abs=1e-4)
                assert two[index].entropies == pytest.approx(row.entropies, abs=1e-4)
            several.load(str(guesser))
        assert list(several.generate([], sampling)) == []
        with pytest.raises(InputError, match="has an empty prompt"):
            list(several.generate([Request(0, [], 0)], sampling))
        assert below() == before  # whoever listens on would mix up the answers
    finally:
        several.close()

    several = open_engines(recipe(processes=2, batch_size=1), str(guesser))
    try:
        rows = several.generate(requests(400), Sampling(1.0, 200))
        next(rows)
        lost = [p for p in below() if "exgrpo_cli.engines.parallel" in p.cmdline()][-1]
        lost.kill()
        with pytest.raises(StageError, match=r"engine [12] of 2 ended \(killed by signal 9\)"):
            list(rows)
        assert below() == before
    finally:
        several.close()


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    before = below()
    with pytest.raises(InputError, match="nowhere"):
        open_engines(recipe(processes=2), str(tmp_path / "nowhere"))
    assert below() == before


PARENT = """
import sys
import polars
from exgrpo_cli.engines import Request, Sampling, open_engines
from exgrpo_cli.recipe import parse_recipe

polars.LazyFrame({"a": [1]}).collect()  # it takes over SIGINT
rollout = {"engine": "transformers", "processes": 2, "batch_size": 1}
engine = open_engines(parse_recipe({"rollout": rollout}, "test"), sys.argv[1])
for row in engine.generate([Request(i, [5, 6], i) for i in range(10_000)], Sampling(1.0, 50)):
    print("row", flush=True)
"""


def start_parent(policy: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(policy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_the_processes_end_with_a_parent_that_is_killed(guesser: Path) -> None:
    parent = start_parent(guesser)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "row\n"
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) == 2
    parent.kill()
    parent.wait(10)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_ctrl_c_does_not_wait_for_processes_that_are_opening(guesser: Path) -> None:
    parent = start_parent(guesser)
    deadline = time.monotonic() + 60
    while len(psutil.Process(parent.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    started = psutil.Process(parent.pid).children()
    for process in started:
        process.suspend()  # it would open for ever
    time.sleep(0.5)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(60) != 0
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shares(count: int, each: int) -> list[str]:
        return [e["CUDA_VISIBLE_DEVICES"] for e in process_environments(count, each)]

    assert shares(4, 1) == ["0", "1", "2", "3"]
    assert shares(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-a,2")
    assert shares(2, 2) == ["7,5", "GPU-a,2"]
    with pytest.raises(InputError, match=r"3 processes of 2 GPUs each need 6 GPUs, and 4 are"):
        process_environments(3, 2)


def test_cores_are_shared_out_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 8, 9, 10}, raising=False)
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    assert process_environments(2) == [
        {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "3,4"},
        {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "8,9"},
    ]
    assert process_environments(6)[5] == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert process_environments(6)[0] == {"OMP_NUM_THREADS": "7"}
