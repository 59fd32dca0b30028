"""Users' functions that damage their process: it costs their own answer, and nothing else."""

import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from exgrpo_cli.verifiers import Verdict
from exgrpo_cli.verifiers.pool import Job, Pool

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's subreapers")


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[..., str]:
    def write(body: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return f"{path}:judge"

    return write


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


RESULTS = {
    "True": 1.0,
    "False": 0.0,
    "1": 1.0,
    "-2": -2.0,
    "0.25": 0.25,
    "np.float32(0.5)": 0.5,
    "np.float64(0.5)": 0.5,
    "np.float16(0.5)": 0.5,
    "np.int8(1)": 1.0,
    "np.True_": 1.0,
    "np.False_": 0.0,
    "np.array(0.5)": 0.5,
    "fractions.Fraction(1, 4)": 0.25,
    "decimal.Decimal('0.25')": 0.25,
    "3.4028234e38": float(np.float32(3.4028234e38)),
    "1e-60": 0.0,
    # no rewards
    "1e39": "a 32-bit number cannot hold",
    "-1e39": "a 32-bit number cannot hold",
    "3.41e38": "a 32-bit number cannot hold",
    "10**400": "not a bool or a number",
    "10**39": "a 32-bit number cannot hold",
    "np.float64(1e39)": "a 32-bit number cannot hold",
    "float('inf')": "a 32-bit number cannot hold",
    "float('-inf')": "a 32-bit number cannot hold",
    "float('nan')": "returned nan",
    "np.float32('nan')": "returned nan",
    "decimal.Decimal('sNaN')": "",
    "None": "returned None",
    "'1'": "returned '1', not a bool",
    "'correct'": "not a bool",
    "b'1'": "not a bool",
    "bytearray(b'1')": "a bytearray, not a bool",
    "memoryview(b'1')": "a memoryview, not a bool",
    "np.str_('1')": "not a bool",
    "np.array([1.0, 0.0])": "not a bool",
    "[1.0]": "a list, not a bool",
    "(True, 'well done')": "a tuple, not a bool",
    "{'score': 1.0}": "a dict, not a bool",
    "1j": "a complex, not a bool",
    "object()": "a object, not a bool",
    "judge": "a function, not a bool",
    "1/0": "ZeroDivisionError",
    "Lies()": "RuntimeError: no number after all",
    "Wide()": "",
}


def test_what_functions_return(user_file: Callable[..., str]) -> None:
    verifier = user_file(
        """
        import decimal, fractions
        import numpy as np

        class Lies:
            def __float__(self):
                raise RuntimeError("no number after all")

        class Wide:
            def __float__(self):
                return "wide"

        def judge(response, answer, metadata):
            return eval(response)
        """
    )
    for text, verdict in zip(RESULTS, judge(verifier, *RESULTS), strict=True):
        expected = RESULTS[text]
        if isinstance(expected, str):
            assert (verdict.status, verdict.reward, verdict.correct) == ("error", 0.0, False), text
            assert expected in verdict.why, text
            assert verdict.why
        else:
            assert verdict.status == "ok", (text, verdict.why)
            assert np.float32(verdict.reward) == np.float32(expected), text
            assert verdict.correct == (expected >= 0.5), text
        assert math.isfinite(np.float32(verdict.reward))


DAMAGE = {
    "stdout": "print('x' * 100_000); sys.stdout.flush()",
    "foreign descriptors": """
        line = b'\\n{"status": "ok", "reward": 1.0, "correct": true, "ready": true}\\n'
        for number in range(3, 256):
            try:
                os.write(number, line * 50)
            except OSError:
                pass
        """,
    "half a line": """
        for number in range(3, 256):
            try:
                os.write(number, b'{"reward": 1.0')
            except OSError:
                pass
        """,
    "json": """
        import json
        json.dumps = json.loads = lambda *a, **k: '{"reward": 1.0}'
        json.JSONEncoder.encode = json.JSONDecoder.decode = json.dumps
        """,
    "builtins": """
        import builtins
        builtins.float = builtins.isinstance = builtins.repr = lambda *a: 1.0
        builtins.hasattr = builtins.type = builtins.abs = lambda *a: True
        """,
    "os": "os.write = os.read = os._exit = os.getpid = lambda *a: 0",
    "math": "import math; math.isnan = math.isfinite = lambda x: False",
    "modules": "sys.modules.clear()",
    "package": """
        import exgrpo_cli.verifiers, exgrpo_cli.verifiers.function as f
        exgrpo_cli.verifiers.Verdict = None
        f._float = f.float = lambda value: 1.0
        f.judge = lambda *a: (1.0, 'forged')
        """,
    "path": "sys.path.clear(); sys.argv.clear(); os.environ.clear()",
    "descriptors limit": """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        """,
    "descriptors hard limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "file size limit": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "processor limit": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (5, 5))",
    "folder": "import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "root": "os.chdir('/')",
    "handlers": """
        for number in signal.valid_signals():
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        """,
    "masked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "alarm": """
        signal.signal(signal.SIGALRM, lambda *a: os.abort())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        """,
    "threads": """
        import threading
        def annoy():
            while True:
                for number in range(3, 40):
                    try:
                        os.write(number, b'\\n{"reward": 1.0}\\n')
                    except OSError:
                        pass
                time.sleep(0.001)
        threading.Thread(target=annoy).start()
        """,
    "late lines": """
        import threading
        def annoy():
            for number in range(3, 40):
                try:
                    os.write(number, b'\\n\\n \\n{}\\n')
                except OSError:
                    pass
        threading.Timer(0.02, annoy).start()
        """,
    "fork": "os.fork()",
    "forks": "os.fork(); os.fork(); os.fork()",
    "group": "os.setsid() if os.getpid() != os.getpgrp() else os.setpgid(0, os.getpgid(0))",
    "trace": "sys.settrace(lambda *a: None); sys.setrecursionlimit(60)",
    "collector": "import gc; gc.disable(); gc.set_threshold(1)",
    "standard descriptors": "os.closerange(0, 3)",
    "streams": "sys.stdout = sys.stderr = sys.stdin = None",
    "buffers": "sys.stdout.close(); sys.stderr.close()",
    "hook": "sys.excepthook = sys.unraisablehook = sys.displayhook = None",
    "exit handlers": "import atexit; atexit.register(time.sleep, 100)",
    "hash": "import random; random.seed(0); os.umask(0o777)",
    "nice": "os.nice(5)",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_forges_no_verdict(kind: str, user_file: Callable[..., str]) -> None:
    body = textwrap.indent(textwrap.dedent(DAMAGE[kind]).strip(), " " * 8)
    verifier = user_file(
        f"""
import os, signal, sys, time

def judge(response, answer, metadata):
    if response.startswith("damage"):
{body}
        return False
    time.sleep(0.04)
    return response == "right"
"""
    )
    verdicts = judge(verifier, "damage, damage", "right", "wrong", "damage", "right!")
    for verdict, right in zip(verdicts, (False, True, False, False, False), strict=True):
        assert (verdict.status, verdict.correct) == ("ok", right), verdict.why
        assert verdict.reward == float(right)


LOST = {
    "descriptors": ("os.closerange(0, 4096)", "error", "channel was closed"),
    "replaced": (
        "os.closerange(3, 4096)\n        for _ in range(64): os.open('/dev/null', os.O_RDWR)",
        "error",
        "channel was closed",
    ),
    "exit": ("os._exit(0)", "error", "exit status 0"),
    "status": ("os._exit(7)", "error", "exit status 7"),
    "abort": ("os.abort()", "error", "killed by signal 6"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "error", "killed by signal 11"),
    "group": ("os.killpg(0, signal.SIGKILL)", "error", "killed by signal 9"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "timeout", "not done"),
    "keeper": ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)", "error", "killed"),
    "child answers": ("os._exit(0) if os.fork() else None", "error", "exit status 0"),
    "exec": ("os.execv('/bin/true', ['true'])", "error", "exit status 0"),
    "sleeps": ("time.sleep(60)", "timeout", "not done"),
    "busy": ("9 ** 9 ** 9", "timeout", "not done"),
    "deaf": (
        "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]\n        time.sleep(60)",
        "timeout",
        "not done",
    ),
    "exits": ("sys.exit(0)", "error", "SystemExit"),
    "interrupt": ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    "recursion": ("return judge(response, answer, metadata)", "error", "RecursionError"),
    "endless result": (
        "return type('R', (), {'__float__': lambda s: time.sleep(60)})()",
        "timeout",
        "not done",
    ),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_lost_worker_costs_its_own_answer(kind: str, user_file: Callable[..., str]) -> None:
    body, status, why = LOST[kind]
    verifier = user_file(
        f"""
import os, signal, sys, time

def judge(response, answer, metadata):
    if response == "damage":
        {body}
        return True
    return response == "right"
"""
    )
    verdicts = judge(verifier, "right", "damage", "wrong", timeout=1.5)
    assert [(v.status, v.correct) for v in verdicts] == [
        ("ok", True),
        (status, False),
        ("ok", False),
    ], [v.why for v in verdicts]
    assert why in verdicts[1].why


def test_functions_and_built_in_verifiers_have_workers_of_their_own(
    user_file: Callable[..., str],
) -> None:
    evil = user_file(
        """
        import exgrpo_cli.verifiers.exact as exact
        from exgrpo_cli.verifiers import Verdict

        exact.judge = lambda *a, **k: Verdict("ok", 1.0, True)

        def judge(response, answer, metadata):
            return True
        """,
        "evil",
    )
    good = user_file(
        """
        import sys
        def judge(response, answer, metadata):
            return any("evil" in name for name in sys.modules)
        """,
        "good",
    )
    jobs = []
    for number in range(6):
        jobs += [
            Job(evil, "1", None, f"{number}"),
            Job("exact", f"{number}", "other"),
            Job(good, "1", None, f"{number}"),
            Job("math", "0.5", r"\frac{1}{2}"),
        ]
    for workers in (1, 3):
        with Pool(workers) as pool:
            verdicts = pool.judge(jobs)
        assert [v.status for v in verdicts] == ["ok"] * len(jobs)
        assert [v.correct for v in verdicts] == [True, False, False, True] * 6


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
    import subprocess

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
