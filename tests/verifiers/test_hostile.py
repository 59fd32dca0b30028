"""Users' functions that damage their process: it costs their own answer, and nothing else."""

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest

from exgrpo_cli.verifiers.pool import Job, Pool
from worker_processes import judge

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


def test_without_a_stderr(user_file: Callable[..., str]) -> None:
    verifier = user_file(
        """
        import sys
        def judge(response, answer, metadata):
            print("out")
            print("err", file=sys.stderr)
            return True
        """
    )
    script = (
        "import os, sys\nfrom exgrpo_cli.verifiers.pool import Job, Pool\nos.close(2)\n"
        "with Pool(1) as pool:\n"
        "    verdict = pool.judge([Job(sys.argv[1], '1', None, 'x')])[0]\n"
        "os._exit(0 if verdict.correct else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, verifier], check=False).returncode == 0
