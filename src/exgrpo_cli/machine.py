"""This machine: cores and GPUs that a process may use, its rank under ``torchrun``, and that none
outlives the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from exgrpo_cli.errors import InputError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def processes() -> int:
    """How many processes ``torchrun`` started, on all machines; 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first_process() -> bool:
    """Whether this process speaks, locks and records for all that torchrun started."""
    return processes() == 1 or os.environ.get("RANK", "0") == "0"


def is_first_of_machine() -> bool:
    """Whether this process says what all processes of its machine would say alike."""
    return processes() == 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def process_environments(count: int, gpus_each: int = 1) -> list[dict[str, str]]:
    """Environment variables for processes that share this machine's devices: GPUs, or without any
    its cores, where the environment does not say which already."""
    names = gpus()
    if not names:
        return core_shares(count)
    if count * gpus_each > len(names):
        raise InputError(
            f"{count} processes of {gpus_each} GPUs each need {count * gpus_each} GPUs, and"
            f" {len(names)} are here; see rollout.processes, rollout.tensor_parallel,"
            " score.processes"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[i * gpus_each : (i + 1) * gpus_each])}
        for i in range(count)
    ]


def gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` calls them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def cores() -> list[int]:
    """The cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_share(count: int) -> int:
    """How many cores each of ``count`` processes gets; at least one."""
    return max(len(cores()) // count, 1)


def core_shares(count: int) -> list[dict[str, str]]:
    """Environment variables for processes that share this machine's cores, where the environment
    does not say which already."""
    each = core_share(count)
    shares = []
    for number in range(count):
        share = {"OMP_NUM_THREADS": str(each)}
        if len(cores()) >= count:  # vLLM's threads would all take the first cores
            own = cores()[number * each : (number + 1) * each]
            share["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, own))
        shares.append({name: os.environ.get(name, value) for name, value in share.items()})
    return shares


def end_with_parent(
    parent: int, *, group: bool = False, number: signal.Signals = signal.SIGKILL
) -> None:
    """Arrange that this process ends when its parent is gone, whatever either is doing.

    On Linux the kernel kills it, even in the middle of one endless operation; but also when only
    the parent's thread that started this process ends. Elsewhere, and for a group, a thread
    watches, which such an operation can hold up.

    Args:
        parent: the parent's process id, as the parent knows it: it may be gone already.
        group: the whole process group ends with it, by SIGTERM.
        number: the signal that ends this process alone, on Linux.
    """
    watched = group or sys.platform != "linux"
    if not watched:
        _prctl(_PR_SET_PDEATHSIG, number)

    def end() -> None:
        if group:
            os.killpg(0, signal.SIGTERM)
        else:
            os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end()

    if os.getppid() != parent:  # it was gone before we asked
        end()
    elif watched:
        threading.Thread(target=watch, daemon=True).start()


def descendants() -> list[psutil.Process]:
    """All processes below this one, but for the one that Python itself starts beside spawned ones:
    it ends with us, and puts in order what the others have shared."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
    return found


def end_groups(leaders: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """End processes with their groups, whatever they are doing; by force what does not end in
    time."""
    import subprocess

    for number in (signal.SIGTERM, signal.SIGKILL):
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, number)
        deadline = time.monotonic() + seconds
        for leader in leaders:
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(max(deadline - time.monotonic(), 0.0))


def end_descendants() -> None:
    """Kill all processes below this one, and wait for them to be gone."""
    import psutil

    found = descendants()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=5.0)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end, also of those that have gone into
    a session of their own (Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_standard_descriptors() -> None:
    """Have 0, 1 and 2 open (``exgrpo 2>&-``), so that nothing else gets one of these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
