"""Which line of vLLM's output says why it did not start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from exgrpo_cli.engines.output import explained, root_cause

FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {%s}"

# A core whose worker has failed, as vLLM 0.32 writes it.
WORKER = """\
(EngineCore pid=7) INFO 12-01 01:00:00 [core.py:93] Initializing a V1 LLM engine
(Worker_TP0 pid=8) ERROR 12-01 01:00:01 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker_TP0 pid=8) ERROR 12-01 01:00:01 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP0 pid=8) ERROR 12-01 01:00:01 [multiproc_executor.py:953]   File "x.py", line 3, in f
(Worker_TP0 pid=8) ERROR 12-01 01:00:01 [multiproc_executor.py:953]     raise OSError(28)
(Worker_TP0 pid=8) ERROR 12-01 01:00:01 [multiproc_executor.py:953] %s
(EngineCore pid=7) ERROR 12-01 01:00:02 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 12-01 01:00:02 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 12-01 01:00:02 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7) Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""  # noqa: E501


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_b7c2'", "--shm-size"),
        ("RuntimeError: unable to write to file </torch_8_1_0>: No space left on device (28)",
         "--shm-size"),
        ("OSError: [Errno 28] No space left on device: '/root/.cache/vllm'", "a disk is full"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
         "rollout.tensor_parallel"),
        ("ValueError: No available memory for the cache blocks. Try increasing it.",
         "rollout.gpu_memory_utilization, or lower rollout.max_prompt_tokens"),
        (("ValueError: To serve at least one request with the models's max seq len (40960), 5 GiB"
         " KV cache is needed"), "or lower rollout.max_prompt_tokens and rollout.max_new_tokens"),
        (("ValueError: Free memory on device cuda:0 (9/80 GiB) on startup is less than desired GPU"
         " memory utilization (0.9, 72 GiB)."), "lower rollout.gpu_memory_utilization"),
        ("KeyError: 'rope_type'", "VLLM_LOGGING_LEVEL=INFO shows all"),
    ],
)  # fmt: skip
def test_the_workers_reason_is_found(line: str, mend: str) -> None:
    text = WORKER % line
    assert root_cause(text) == line
    said = explained(FAILED % "", text)
    assert said.startswith(line.rstrip("."))
    assert mend in said


def test_chained_exceptions() -> None:
    chain = "FileNotFoundError: no such file: x\n\n%s:\n\nTraceback (most recent call last):\n  y\n"
    caused = chain % "The above exception was the direct cause of the following exception"
    handled = chain % "During handling of the above exception, another exception occurred"
    assert root_cause(caused + "RuntimeError: opening failed") == (
        "FileNotFoundError: no such file: x"
    )
    assert root_cause(handled + "RuntimeError: opening failed") == "RuntimeError: opening failed"


def test_processes_that_die_without_a_word() -> None:
    assert "ended by signal 9; this machine's memory ran out" in explained(
        FAILED % "'EngineCore': -9", "loading ...\n"
    )
    assert "/dev/shm" in explained(FAILED % "'EngineCore': -7", "")
    assert explained("something odd.", "").startswith("something odd; VLLM_LOGGING_LEVEL")
    assert len(explained("x" * 9999, "")) < 500


PROGRAM = """
import subprocess, sys
from exgrpo_cli.engines.output import heard

def say(what):
    subprocess.run([sys.executable, "-c", f"import os; os.write(1, b'{what} one.'); "
                    f"os.write(2, b'{what} two.')"], check=True)

with heard(show=sys.argv[1] == "show") as text:
    say("start")
    later = subprocess.Popen([sys.executable, "-c", "import os; input(); os.write(1, b'later.')"],
                             stdin=subprocess.PIPE)
later.communicate(b"\\n")
got = text()
assert "start one." in got and "start two." in got, got
assert "later" not in got
say("after")
"""


@pytest.mark.parametrize("show", [False, True])
def test_children_are_heard_while_they_start_and_shown_later(show: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "show" if show else "hide"],
        capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("start one." in done.stderr, "start two." in done.stderr) == (show, show)
    assert "later." in done.stderr
    assert "after two." in done.stderr
    assert done.stdout == "after one."
