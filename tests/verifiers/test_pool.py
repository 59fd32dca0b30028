"""Worker processes: hard limits, isolation, and none left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.verifiers.pool import Job, Pool
from worker_processes import running, servers_alive, workers_alive

TOWER = "9^{9^{9^9}}"
HOSTILE = [
    TOWER,
    "{" * 100_000 + "1" + "}" * 100_000,
    "1" * 1_000_000,
    "((((10!)!)!)!)!",
    "\\boxed{" * 1000,
    r"\begin{pmatrix}" + r"\\".join("&".join("12345" for _ in range(300)) for _ in range(300)),
    "1\x002",
    "\x00",
    "\ud800",
    "\udfff5\ud800",
    "",
    "\\",
    "}{",
]


def test_hostile_answers_get_a_status_and_others_their_verdicts() -> None:
    jobs = []
    for text in HOSTILE:
        jobs += [
            Job("math", "4.2", text),
            Job("math", "0.5", r"\frac{1}{2}"),
            Job("math", "0.5", r"\frac{1}{3}"),
        ]
    jobs.append(Job("math", TOWER, "1"))  # a hostile gold
    begin = time.monotonic()
    with Pool(2, timeout=0.7, memory_mb=512) as pool:
        verdicts = pool.judge(jobs)
        # The kernel's peak of each worker that is left, imports included.
        for worker in workers_alive():
            assert peak_memory(worker.pid) < 1024
    assert time.monotonic() - begin < 60
    hostile, right, wrong = verdicts[0:-1:3], verdicts[1::3], verdicts[2::3]
    assert all(v.correct and v.status == "ok" for v in right)
    assert all(not v.correct and v.status == "ok" for v in wrong)
    assert all(not v.correct and v.reward == 0 for v in hostile)
    assert hostile[0].status == "timeout"
    assert all(v.status in ("ok", "timeout", "error") for v in hostile)
    assert all(v.seconds < 2.0 for v in verdicts)
    assert verdicts[-1].status == "timeout"


def peak_memory(pid: int) -> float:
    """MiB of memory that a process has had at most; 0 where the kernel does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def test_a_users_function(user_file: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("GOOD = 'yes'\n", encoding="utf-8")
    verifier = user_file(
        """
        import os, sys, time
        import helper

        print("a file may print")

        class Mute(BaseException):
            def __str__(self):
                raise RuntimeError

        def judge(response: str, answer: str, metadata: dict) -> bool | float:
            print("so may a function")
            os.write(1, b"in any way\\n")
            match response:
                case "right": return helper.GOOD == "yes"
                case "metadata": return metadata["unit"] == "m" and answer == "gold"
                case "half": return 0.5
                case "little": return 0.25
                case "text": return "yes"
                case "nothing": return None
                case "nan": return float("nan")
                case "raise": raise RuntimeError("no idea")
                case "exit": sys.exit(3)
                case "die": os._exit(3)
                case "mute": raise Mute()
                case "sleep": time.sleep(60)
                case "memory": return bool(bytearray(4 * 2**30))
                case "read": return sys.stdin.read() == ""
        """
    )

    def job(response: str) -> Job:
        return Job(verifier, "gold", None, response, {"unit": "m"})

    names = (
        "right metadata half little text nothing nan raise mute exit die sleep memory read right"
    )
    with Pool(2, timeout=1.5, memory_mb=512) as pool:
        verdicts = pool.judge([job(name) for name in names.split()])
    got = dict(zip(names.split(), verdicts, strict=True))
    for name in ("right", "metadata", "read"):
        assert (got[name].status, got[name].correct, got[name].reward) == ("ok", True, 1.0), name
    assert (got["half"].correct, got["half"].reward) == (True, 0.5)
    assert (got["little"].correct, got["little"].reward) == (False, 0.25)
    for name in ("text", "nothing", "nan", "raise", "mute", "exit", "die", "memory"):
        assert (got[name].status, got[name].correct, got[name].reward) == ("error", False, 0.0), (
            name
        )
    assert got["sleep"].status == "timeout"
    assert "no idea" in got["raise"].why
    assert "exit status 3" in got["die"].why
    assert "512 MiB" in got["memory"].why


def test_workers_that_died_between_calls_are_replaced(user_file: Callable[[str], str]) -> None:
    verifier = user_file("def judge(response, answer, metadata):\n    return True\n")
    with Pool(4) as pool:
        for call in range(2):
            jobs = [Job(verifier, f"gold {i}", None, f"{call}/{i}") for i in range(8)]
            assert [verdict.status for verdict in pool.judge(jobs)] == ["ok"] * 8
            idle = workers_alive()
            for worker in idle:
                worker.kill()
            assert not psutil.wait_procs(idle, timeout=10)[1]


def test_a_timeout_may_be_asked_for_again(user_file: Callable[[str], str], tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    verifier = user_file(
        """
        import os, time
        def judge(response, answer, metadata):
            time.sleep(60 if os.path.exists(answer) else 0)
            return True
        """
    )
    job = Job(verifier, str(busy), None, "slow")
    with Pool(1, timeout=0.5) as pool:
        assert pool.judge([job])[0].status == "timeout"
        busy.unlink()
        assert pool.judge([job])[0].status == "timeout"  # remembered, as within one call of verify
        pool.forget_timeouts()
        assert pool.judge([job])[0].status == "ok"


def test_a_function_that_leaks_costs_no_verdict(
    user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        """
        import os
        kept = []
        def judge(response, answer, metadata):
            kept.append(bytearray(100 * 2**20))
            with open(answer, "a") as pids:
                print(os.getpid(), file=pids)
            return True
        """,
    )
    pids = tmp_path / "pids"
    with Pool(1, memory_mb=512) as pool:
        for call in range(2):  # workers stay from call to call
            jobs = [Job(verifier, str(pids), None, f"{call}/{i}") for i in range(6)]
            assert [verdict.status for verdict in pool.judge(jobs)] == ["ok"] * 6
    used = pids.read_text().split()
    assert len(used) == 12
    assert 3 <= len(set(used)) <= 4  # 4 or 5 answers each


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise OSError('no such database')", "no such database"),
        ("def judge(:", "SyntaxError"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("import os; os._exit(1)", "exit status 1"),
        ("other = 1", "no function judge"),
        ("judge = 1", "is no function"),
    ],
)
def test_a_file_that_cannot_be_loaded(
    user_file: Callable[[str], str], body: str, words: str
) -> None:
    verifier = user_file(body)
    with Pool(1) as pool, pytest.raises(InputError, match=words) as caught:
        pool.judge([Job(verifier, "1", None, "x")])
    assert verifier in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_verifiers() -> None:
    with Pool(1) as pool:
        with pytest.raises(InputError, match="unknown verifier 'maths'"):
            pool.judge([Job("maths", "1", "1")])
        with pytest.raises(InputError, match="no such file"):
            pool.judge([Job("gone.py:judge", "1", "1")])


def test_loading_and_queueing_do_not_count(user_file: Callable[[str], str]) -> None:
    verifier = user_file(
        """
        import time

        time.sleep(1.2)

        def judge(response, answer, metadata):
            time.sleep(0.4)
            return True
        """
    )
    with Pool(1, timeout=1.0) as pool:
        verdicts = pool.judge([Job(verifier, "1", None, str(i)) for i in range(3)])
    assert [v.status for v in verdicts] == ["ok"] * 3
    assert all(0.4 <= v.seconds < 1.0 for v in verdicts)


def test_equal_answers_are_judged_once(user_file: Callable[[str], str], tmp_path: Path) -> None:
    verifier = user_file(
        f"""
        def judge(response, answer, metadata):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write(response)
            return True
        """
    )
    with Pool(2) as pool:
        first = pool.judge([Job(verifier, "1", None, r) for r in "aabab"])
        again = pool.judge([Job(verifier, "1", None, r) for r in "bca"])
    assert sorted((tmp_path / "calls").read_text()) == ["a", "b", "c"]
    assert all(v.correct for v in first + again)
    assert [v.seconds > 0 for v in first] == [True, False, True, False, False]
    assert [v.seconds > 0 for v in again] == [False, True, False]


def test_long_answers_are_not_left_for_the_end(
    user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        f"""
        def judge(response, answer, metadata):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write(response[0] + answer)
            return True
        """
    )
    jobs = [("1", "a"), ("2", "b"), ("1", "c"), ("2", "d" * 50)]
    with Pool(1) as pool:
        pool.judge([Job(verifier, gold, None, response) for gold, response in jobs])
    # the longest first, and with it the others of its gold answer
    assert (tmp_path / "calls").read_text() == "d2b2a1c1"


def test_a_worker_killed_from_outside_is_replaced(
    user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        f"""
        import os, signal
        from pathlib import Path

        def judge(response, answer, metadata):
            flag = Path({str(tmp_path)!r}) / "killed"
            if response == "always" or not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return True
        """
    )
    with Pool(1) as pool:
        verdicts = pool.judge([Job(verifier, "1", None, r) for r in ("once", "always", "never")])
    assert [v.status for v in verdicts] == ["ok", "error", "ok"]
    assert "signal 9" in verdicts[1].why


def test_no_answer_needs_no_worker() -> None:
    with Pool(2) as pool:
        assert pool.judge([Job("math", "1", None)])[0].status == "no_answer"
        sure = pool.judge([Job("math", "1", "1"), Job("math", "1", "2")])
        assert [(v.status, v.correct, v.reward) for v in sure] == [
            ("ok", True, 1.0),
            ("ok", False, 0.0),
        ]
        assert pool.judge([]) == []
        assert not servers_alive()


def test_nothing_in_the_current_folder_shadows_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "sympy", "math_verify", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    with Pool(1) as pool:
        assert pool.judge([Job("math", "0.5", r"\frac{1}{2}")])[0].correct


def test_gold_answers_are_checked_within_the_limit() -> None:
    golds = [("math", "1/2"), ("math", ""), ("choice", "K"), ("numeric", "x"), ("exact", "x")]
    golds += [("math", "10!!!!!!"), ("math", "1/2")]
    with Pool(1, timeout=1.0) as pool:
        faults = pool.check_golds([Job(verifier, gold, None) for verifier, gold in golds])
    assert [fault is None for fault in faults] == [
        True,
        False,
        False,
        False,
        True,
        faults[5] is None,
        True,
    ]


SCRIPT = """
import sys
from exgrpo_cli.verifiers.pool import Job, Pool

with Pool(2, timeout=120) as pool:
    pool.judge([Job(sys.argv[1], "1", None, response) for response in ("a", "b")])
"""


def start_stuck_parent(
    verifier: str, folder: Path
) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A parent whose two workers are each in one endless operation that no thread interrupts."""
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, verifier], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "a").exists() and (folder / "b").exists():
            time.sleep(0.2)
            workers = workers_alive(parent.pid)
            assert len(workers) == 2
            return parent, workers
        time.sleep(0.05)
    parent.kill()
    raise AssertionError("the workers never got to work")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_its_parent(
    number: signal.Signals, user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        f"""
        from pathlib import Path

        def judge(response, answer, metadata):
            (Path({str(tmp_path)!r}) / response).touch()
            return 9 ** 9 ** 9 > 0
        """
    )
    parent, workers = start_stuck_parent(verifier, tmp_path)
    os.kill(parent.pid, number)
    _, errors = parent.communicate(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=10)
    for worker in alive:
        worker.kill()
    assert not alive
    if number == signal.SIGINT:
        assert errors.count(b"KeyboardInterrupt") == 1  # the parent's own, none of a worker's


def test_what_a_function_started_ends_with_its_worker(
    user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        f"""
        import subprocess
        from pathlib import Path

        def judge(response, answer, metadata):
            process = subprocess.Popen(["sleep", "600"])
            (Path({str(tmp_path)!r}) / "pid").write_text(str(process.pid))
            process.wait()
            return True
        """
    )
    with Pool(1, timeout=1.0) as pool:
        assert pool.judge([Job(verifier, "1", None, "x")])[0].status == "timeout"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and running(pid):
        time.sleep(0.05)
    assert not running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes a little longer")
def test_nor_does_it_outlive_a_parent_that_is_killed(
    user_file: Callable[[str], str], tmp_path: Path
) -> None:
    verifier = user_file(
        f"""
        import subprocess
        from pathlib import Path

        def judge(response, answer, metadata):
            process = subprocess.Popen(["sleep", "600"])
            (Path({str(tmp_path)!r}) / ("pid-" + response)).write_text(str(process.pid))
            (Path({str(tmp_path)!r}) / response).touch()
            process.wait()
            return True
        """
    )
    parent, workers = start_stuck_parent(verifier, tmp_path)
    started = [int((tmp_path / f"pid-{name}").read_text()) for name in "ab"]
    assert all(running(pid) for pid in started)
    parent.kill()
    parent.communicate(timeout=20)
    deadline = time.monotonic() + 10
    everyone = started + [worker.pid for worker in workers]
    while time.monotonic() < deadline and any(running(pid) for pid in everyone):
        time.sleep(0.05)
    assert not [pid for pid in everyone if running(pid)]


def test_no_worker_after_a_normal_end() -> None:
    with Pool(2, timeout=5) as pool:
        pool.judge([Job("exact", "1", "1"), Job("exact", "1", "2")])
        workers = workers_alive()
        assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=5)[1]


def test_workers_end_when_a_pool_is_not_closed() -> None:
    script = """
import os, psutil
from exgrpo_cli.verifiers.pool import Job, Pool

pool = Pool(1)
pool.judge([Job("exact", "1", "1")])
print(psutil.Process().children()[0].pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(done.stdout))
