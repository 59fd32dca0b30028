"""What of this machine a process may use: cores, GPUs, and its rank under ``torchrun``."""

from __future__ import annotations

import os

from exgrpo_cli.errors import InputError


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
    """Environment variables for processes that share this machine's devices.

    Args:
        count: how many processes.
        gpus_each: how many GPUs one takes.

    Returns:
        For each process ``CUDA_VISIBLE_DEVICES``; without a GPU, cores instead, where the
        environment does not say which already.

    Raises:
        InputError: there are not so many GPUs.
    """
    import torch

    there = torch.cuda.device_count()
    if there == 0:
        return _core_shares(count)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(there)]
    if count * gpus_each > there:
        raise InputError(
            f"{count} processes of {gpus_each} GPUs each need {count * gpus_each} GPUs, and"
            f" {there} are here; see rollout.processes, rollout.tensor_parallel, score.processes"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[i * gpus_each : (i + 1) * gpus_each])}
        for i in range(count)
    ]


def cores() -> list[int]:
    """The cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_share(count: int) -> int:
    """How many cores each of ``count`` processes gets; at least one."""
    return max(len(cores()) // count, 1)


def _core_shares(count: int) -> list[dict[str, str]]:
    each = core_share(count)
    shares = []
    for number in range(count):
        share = {"OMP_NUM_THREADS": str(each)}
        if len(cores()) >= count:  # vLLM's threads would all take the first cores
            own = cores()[number * each : (number + 1) * each]
            share["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, own))
        shares.append({name: os.environ.get(name, value) for name, value in share.items()})
    return shares
