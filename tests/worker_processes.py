"""Verifier workers as processes, for several tests."""

import time

import psutil

from exgrpo_cli.verifiers import Verdict
from exgrpo_cli.verifiers.pool import Job, Pool


def servers_alive(pid: int | None = None) -> list[psutil.Process]:
    """The verifiers' servers of a process; other tests' children do not count."""
    return [
        child
        for child in psutil.Process(pid).children()
        if "exgrpo_cli.verifiers.server" in " ".join(child.cmdline())
    ]


def workers_alive(pid: int | None = None) -> list[psutil.Process]:
    """The verifier workers of this process: of each keeper the first child."""
    keepers = [keeper for server in servers_alive(pid) for keeper in server.children()]
    return [worker for keeper in keepers for worker in keeper.children()[:1]]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(pid)


def judge(verifier: str, *responses: str, workers: int = 1, timeout: float = 3.0) -> list[Verdict]:
    jobs = [Job(verifier, "gold", None, response) for response in responses]
    with Pool(workers, timeout=timeout, memory_mb=512) as pool:
        return pool.judge(jobs)
