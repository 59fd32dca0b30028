"""Ctrl-C and SIGTERM, real ones: exit code 130 or 143 and one line, wherever they land."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from exgrpo_cli import tables
from exgrpo_cli.interrupts import LINE
from exgrpo_cli.recipe import to_toml
from exgrpo_cli.rundir import RunDir
from making import curate, group, make_recipe, small_run, write_problems, write_step

ROOT = Path(__file__).parents[1]
MOMENTS = int(os.environ.get("EXGRPO_EXAMPLES", "18"))

# Runs cases in children of its own, so that what is slow to import is imported once: reads a case a
# line on stdin, {"code"} of a command's body or {"argv", "delay"}, and says how its child ended.
HARNESS = textwrap.dedent("""
    import json, os, signal, sys, tempfile, time
    import duckdb, polars, torch
    import exgrpo_cli.stages.curate
    from exgrpo_cli import cli, interrupts
    from exgrpo_cli.cli.app import app, guarded

    def interrupt(*_):
        os.kill(os.getpid(), number)

    def child(case):
        global number
        number = case["number"]
        interrupts.install()
        if "code" in case:
            body = compile(case["code"], "case", "exec")
            app.command("case")(guarded(lambda: exec(body, {"interrupt": interrupt})))
            case["argv"] = ["case"]
        os.write(ready, b".")
        sys.argv[1:] = case["argv"]
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        cli._leave(code)

    for line in sys.stdin:
        case = json.loads(line)
        waiting, ready = os.pipe()
        with tempfile.TemporaryFile() as said:
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(said.fileno(), 2)
                try:
                    child(case)
                finally:
                    os._exit(99)
            os.close(ready)
            os.read(waiting, 1)
            began = time.monotonic()
            if "delay" in case:
                time.sleep(case["delay"])
                os.kill(pid, case["number"])
            status = os.waitpid(pid, 0)[1]
            said.seek(0)
            result = {
                "code": os.waitstatus_to_exitcode(status), "stderr": said.read().decode(),
                "seconds": time.monotonic() - began,
            }
        os.close(waiting)
        print(json.dumps(result), flush=True)
""")


class Harness:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HARNESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __call__(self, **case: object) -> tuple[int, str, float]:
        """A case's exit code, what it said on stderr, and how long it took in seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        result = json.loads(self.process.stdout.readline())
        return result["code"], result["stderr"], result["seconds"]


@pytest.fixture(scope="module")
def harness():
    made = Harness()
    yield made
    made.process.communicate(timeout=60)


def assert_interrupted(code: int, said: str, number: int = signal.SIGINT) -> None:
    assert code == 128 + number, said
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[signal.Signals(number)]
    assert said.splitlines()[-1:] == [LINE.format(word)], said
    assert said.count(word) == 1, said
    for word in ("Traceback", "panicked", "Exception ignored", "Aborted"):
        assert word not in said, said


PLACES = {
    "Python": "interrupt()",
    "a callback of polars, which panics in Rust": """
        import polars
        polars.DataFrame({"a": [1]}).map_rows(lambda row: interrupt())
    """,
    "a column that polars computes": """
        import polars
        polars.Series([1, 2]).map_elements(lambda x: interrupt(), return_dtype=polars.Int64)
    """,
    "a long computation of polars": """
        import polars, threading
        frame = polars.DataFrame({"a": [str(i) for i in range(1_000_000)]})
        threading.Timer(0.1, interrupt).start()
        while True:
            frame.sort("a")
    """,
    "a function of DuckDB's": """
        import duckdb
        con = duckdb.connect()
        con.create_function("f", lambda x: interrupt(), ["BIGINT"], "BIGINT")
        con.execute("SELECT f(range) FROM range(1)").fetchall()
    """,
    "a long query, at which DuckDB sees no signal": """
        import threading
        from exgrpo_cli.tables.duck import open_database
        threading.Timer(0.2, interrupt).start()
        with open_database() as con:
            con.execute("SELECT count(*) FROM range(100000000000) a, range(9) WHERE a.range = 5")
    """,
    "the only thread at a long query": """
        import threading
        from pathlib import Path
        from exgrpo_cli.tables import duck
        threading.Timer(0.2, interrupt).start()
        duck._database().execute("SET threads = 1")
        duck.query("SELECT count(*) FROM range(3000000) a, range(60000) b WHERE a.range % 7 = 5",
                   {}, Path("a.parquet"))
    """,
    "torch's backward pass": """
        import torch
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(interrupt)
        y.sum().backward()
    """,
    "an import that a library tries": """
        import importlib.abc, sys
        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "no_such_module":
                    interrupt()
        sys.meta_path.insert(0, Finder())
        try:
            import no_such_module
        except BaseException as error:
            raise ImportError("the module is broken") from error
    """,
    "a finalizer, which cannot raise": """
        import time
        class Thing:
            def __del__(self):
                interrupt()
                time.sleep(0)
        thing = Thing()
        del thing
        time.sleep(300)
    """,
    "code that takes everything for its own error": """
        try:
            interrupt()
        except BaseException:
            pass
    """,
    "a library that swallows it": """
        import time
        from exgrpo_cli import interrupts
        with interrupts.insisting():
            try:
                interrupt()
            except KeyboardInterrupt:
                time.sleep(300)
    """,
    "a finally": """
        try:
            raise ValueError("something else")
        finally:
            interrupt()
    """,
    "what handles another error": """
        try:
            raise ValueError("something else")
        except ValueError:
            interrupt()
    """,
    "C code that runs Python": """
        import ctypes
        run = ctypes.pythonapi.PyRun_String
        run.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]
        run.restype = ctypes.py_object
        run(b"interrupt()", 257, globals(), globals())
    """,
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_lands(harness: Harness, place: str, number: int) -> None:
    code, said, seconds = harness(code=textwrap.dedent(PLACES[place]), number=number)
    assert_interrupted(code, said, number)
    assert seconds < 200  # it was not waited for


def test_sigterm_ends_what_does_not_come_back_and_what_it_has_started(harness: Harness) -> None:
    code = """
        import hashlib, subprocess, sys, threading
        from exgrpo_cli import interrupts
        interrupts._GRACE = 0.3
        threading.Timer(0.1, interrupt).start()
        started = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(started.pid, file=sys.stderr)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # minutes, in C
    """
    code, said, seconds = harness(code=textwrap.dedent(code), number=signal.SIGTERM)
    assert_interrupted(code, said, signal.SIGTERM)
    assert seconds < 20
    assert not psutil.pid_exists(int(said.split()[0]))


def test_a_second_sigterm_does_not_disturb_what_ends(harness: Harness) -> None:
    code = """
        import sys, time
        try:
            interrupt()
        finally:
            for _ in range(3):
                interrupt()
                time.sleep(0.01)
            print("in order", file=sys.stderr)
    """
    code, said, _ = harness(code=textwrap.dedent(code), number=signal.SIGTERM)
    assert_interrupted(code, said, signal.SIGTERM)
    assert "in order" in said


POLARS = """
import os, signal, sys, threading, time
from pathlib import Path
from exgrpo_cli import interrupts

interrupts.install()
interrupts.begin()
from exgrpo_cli import tables  # with polars, whose own handler comes first from here on

frame = tables.frame("plan", [{"step": 0, "problem_id": "a", "role": "fresh", "samples": 1}])

def interrupt(began, delay):
    began.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)

kept = []
for trial in range(int(sys.argv[2])):
    interrupts._came, began = 0, threading.Event()
    other = threading.Thread(target=interrupt, args=(began, trial % 20 / 1000))
    other.start()
    try:
        began.set()
        while True:
            tables.write_table("plan", frame, Path(sys.argv[1]) / "plan.parquet")
    except KeyboardInterrupt as error:
        kept.append(error)  # with its frames, as until the end of a command
    other.join()
"""


def test_polars_interrupted_while_it_writes_leaves_no_file(tmp_path: Path) -> None:
    """It raises an interrupt of its own, before Python's handler has been called."""
    command = [sys.executable, "-c", POLARS, str(tmp_path), str(MOMENTS * 4)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.glob(".*"))


def test_what_fails_without_an_interrupt_says_why(harness: Harness) -> None:
    """Also a Rust panic, which is no Exception of Python's."""
    code, said, _ = harness(code="raise BaseException('no interrupt')", number=signal.SIGINT)
    assert (code, said) == (
        1, "exgrpo: BaseException: no interrupt (--debug shows the traceback)\n"
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> RunDir:
    """Three steps of a log, the last to be curated."""
    run = RunDir(tmp_path / "run")
    tables.write_text(run.recipe, to_toml(make_recipe()))
    write_problems(run, ["a", "b"])
    for step in range(3):
        write_step(run, step, group(step, "a", "1110") + group(step, "b", "1000"))
        if step < 2:
            curate(run, step, make_recipe())
    return run


def test_at_any_moment_of_a_command(harness: Harness, log: RunDir) -> None:
    """Nothing half-written is left, and the same command then does the work."""
    argv = ["curate", str(log.root), "--step", "2", "--rebuild", "--force"]
    argv += ["--set", "curate.questions=2", "--set", "rollout.samples=4"]
    code, said, whole = harness(argv=argv, number=0)
    assert code == 0, said
    rng = random.Random(0)
    codes = []
    for moment in range(MOMENTS):
        delay = rng.uniform(0, 1.1 * whole)
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        code, said, seconds = harness(argv=argv, delay=delay, number=number)
        if code == 0:  # it was done by then
            whole = min(whole, seconds)
        else:
            assert_interrupted(code, said, number)
        assert not list(log.root.rglob("*.tmp")), delay
        codes.append(code)
    assert MOMENTS - codes.count(0) > MOMENTS / 4
    assert harness(argv=argv, number=0)[0] == 0


def test_at_any_moment_of_a_process(tmp_path: Path) -> None:
    """From the first line of the command on, through its imports, to the end of the interpreter."""
    script = (
        "from exgrpo_cli import __main__, interrupts\n"
        "interrupts.install(); print(flush=True); __main__.main()"
    )
    command = [sys.executable, "-c", script, "show", str(tmp_path / "none.parquet")]

    def run(delay: float | None, number: int = 0) -> tuple[int, str, float]:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert child.stdout is not None
        child.stdout.readline()
        began = time.monotonic()
        if delay is not None:
            time.sleep(delay)
            child.send_signal(number)
        _, said = child.communicate(timeout=60)
        return child.returncode, said, time.monotonic() - began

    code, expected, whole = run(None)
    assert code == 2
    rng = random.Random(1)
    codes = []
    for moment in range(MOMENTS // 3):
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        code, said, seconds = run(rng.uniform(0, 1.1 * whole), number)
        if code == 2:
            assert said == expected
            whole = min(whole, seconds)
        else:
            assert_interrupted(code, said.removeprefix(expected), number)
        codes.append(code)
    assert {130, 143} <= {*codes}


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As a shell's script sets it for what it starts in the background."""
    script = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from exgrpo_cli import interrupts; interrupts.install(); interrupts.begin()\n"
        "os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


@pytest.mark.parametrize("to", ["a terminal's group", "every process of a job", "the one alone"])
def test_it_leaves_no_process(guesser: Path, tmp_path: Path, to: str) -> None:
    number = signal.SIGINT if to == "a terminal's group" else signal.SIGTERM
    run = tmp_path / "run"
    arguments = [
        "run", run, *small_run(guesser), "--steps", 1000, "--set", "curate.questions=64",
    ]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "exgrpo_cli", *map(str, arguments)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (run / "verdicts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    below = psutil.Process(child.pid).children(recursive=True)
    if to == "a terminal's group":
        os.killpg(child.pid, number)
    else:
        for process in [*below, child] if to == "every process of a job" else [child]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert_interrupted(child.returncode, said, number)
    _, alive = psutil.wait_procs(below, timeout=5)
    assert alive == []
    assert not list(run.rglob("*.tmp"))


def test_processes_that_train_together_end_too(exgrpo, guesser: Path, tmp_path: Path) -> None:
    """They are in sessions of their own, and wait for each other in C."""
    words = [*small_run(guesser), "--set", "curate.questions=2", "--set", "train.processes=2"]
    with (tmp_path / "said").open("w+") as said:
        child = exgrpo.start("run", tmp_path / "run", *words, stderr=said.fileno())
        training = 0
        deadline = time.monotonic() + 120
        while training < 3 and time.monotonic() < deadline:  # torchrun and its two
            time.sleep(0.1)
            below = psutil.Process(child.pid).children(recursive=True)
            training = 0
            for process in below:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    training += "train" in process.cmdline()
        os.kill(child.pid, signal.SIGTERM)
        code = child.wait(60)
        said.seek(0)
        assert_interrupted(code, said.read(), signal.SIGTERM)
    _, alive = psutil.wait_procs(below, timeout=5)
    assert alive == []
