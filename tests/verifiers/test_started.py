"""What users' functions start ends with their answers, their workers, and the pool's process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from exgrpo_cli.verifiers.pool import Job, Pool
from worker_processes import ends, judge, running

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's subreapers")


START = {
    "child": "os.execvp('sleep', ['sleep', '600'])",
    "session": "os.setsid(); os.execvp('sleep', ['sleep', '600'])",
    "daemon": "os.setsid(); os.fork() and os._exit(0); os.execvp('sleep', ['sleep', '600'])",
    "deaf daemon": """
            os.setsid()
            os.fork() and os._exit(0)
            for number in (1, 2, 13, 15): signal.signal(number, signal.SIG_IGN)
            os.closerange(0, 4096)
            note()
            time.sleep(600)""",
}


def starting(kind: str, folder: Path, after: str) -> str:
    return f"""
import os, signal, sys, time
from pathlib import Path

def note():
    name = "pid-%d" % time.monotonic_ns()
    (Path({str(folder)!r}) / name).write_text(str(os.getpid()))

def judge(response, answer, metadata):
    if response == "start":
        if os.fork() == 0:
            os.fork() or note()  # two of them
            note()
            {START[kind].strip()}
        time.sleep(0.3)
        {after}
    return True
"""


def noted(folder: Path) -> list[int]:
    pids = [int(file.read_text() or 0) for file in folder.glob("pid-*")]
    assert pids
    return [pid for pid in pids if pid]


@linux
@pytest.mark.parametrize("kind", START)
def test_what_a_function_starts_ends_with_its_answer(
    kind: str, user_file: Callable[..., str], tmp_path: Path
) -> None:
    verifier = user_file(starting(kind, tmp_path, "pass"))
    with Pool(1, timeout=5) as pool:
        assert pool.judge([Job(verifier, "1", None, "start")])[0].correct
        assert not [pid for pid in noted(tmp_path) if running(pid)]
        assert pool.judge([Job(verifier, "1", None, "other")])[0].correct


@linux
@pytest.mark.parametrize("kind", START)
@pytest.mark.parametrize("after", ["time.sleep(60)", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_and_with_a_worker_that_ends(
    kind: str, after: str, user_file: Callable[..., str], tmp_path: Path
) -> None:
    verifier = user_file(starting(kind, tmp_path, after))
    with Pool(1, timeout=1.0) as pool:
        assert pool.judge([Job(verifier, "1", None, "start")])[0].status in ("timeout", "error")
        assert not [pid for pid in noted(tmp_path) if running(pid)]


@linux
def test_and_with_a_keeper_that_it_kills(user_file: Callable[..., str], tmp_path: Path) -> None:
    after = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    verifier = user_file(starting("daemon", tmp_path, after))
    with Pool(1, timeout=2.0) as pool:
        assert pool.judge([Job(verifier, "1", None, "start")])[0].status == "error"
        assert all(ends(pid) for pid in noted(tmp_path))


def test_what_the_file_starts_stays(user_file: Callable[..., str], tmp_path: Path) -> None:
    verifier = user_file(
        f"""
        import subprocess
        from pathlib import Path

        server = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        (Path({str(tmp_path)!r}) / "pid").write_text(str(server.pid))

        def judge(response, answer, metadata):
            subprocess.Popen(["sleep", "600"])
            server.stdin.write(response.encode() + b"\\n")
            return server.stdout.readline() == response.encode() + b"\\n"
        """
    )
    verdicts = judge(verifier, "a", "b", "c")
    assert [verdict.correct for verdict in verdicts] == [True] * 3, verdicts
    assert ends(int((tmp_path / "pid").read_text()))


@linux
def test_processes_that_start_others_without_end(user_file: Callable[..., str]) -> None:
    verifier = user_file(
        """
        import os, time

        def judge(response, answer, metadata):
            if response == "start" and os.fork() == 0:
                os.setsid()
                while True:  # a new process each time, its parent gone
                    if os.fork():
                        os._exit(0)
                    time.sleep(0.002)
            time.sleep(0.2)
            return True
        """
    )
    before = set(psutil.pids())
    assert judge(verifier, "other", "start", timeout=5)[0].correct
    deadline = time.monotonic() + 5
    mine = str(verifier).partition(":")[0]
    while time.monotonic() < deadline:
        left = [p for p in psutil.process_iter() if p.pid not in before and _is_server(p)]
        if not left:
            break
        time.sleep(0.05)
    assert not left, mine


def _is_server(process: psutil.Process) -> bool:
    try:
        return "exgrpo_cli.verifiers.server" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_daemons_do_not_outlive_a_killed_parent(
    number: signal.Signals, user_file: Callable[..., str], tmp_path: Path
) -> None:
    verifier = user_file(starting("deaf daemon", tmp_path, "time.sleep(60)"))
    script = (
        "import sys\nfrom exgrpo_cli.verifiers.pool import Job, Pool\n"
        "Pool(1, timeout=60).judge([Job(sys.argv[1], '1', None, 'start')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, verifier], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    pids = noted(tmp_path)
    assert any(running(pid) for pid in pids)
    os.kill(parent.pid, number)
    parent.wait(20)
    assert all(ends(pid, 10) for pid in pids)
