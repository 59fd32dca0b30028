"""Imported into ``exgrpo run``: its sides are forked from it, instead of started as new processes
that import all of torch. ``EXGRPO_PIDS`` names a folder that gets a file of each one's process id.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic, sleep

from exgrpo_cli import interrupts
from exgrpo_cli.rundir import LOCK_VARIABLE, RunDir
from exgrpo_cli.runs import sides
from exgrpo_cli.tables import write_text

SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Forked:
    """What of ``subprocess.Popen`` is needed of it."""

    def __init__(self, run: RunDir, side: str, variables: Mapping[str, str]) -> None:
        parent = os.getpid()
        ours, theirs = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a new process has no handler yet
        self.pid, self.returncode = os.fork(), None
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.setpgid(self.pid, self.pid)
            os.close(theirs)
            os.set_blocking(ours, False)
            self.stderr = os.fdopen(ours, "rb", 0)
            write_text(Path(os.environ["EXGRPO_PIDS"]) / side, str(self.pid))
            return
        os.setpgid(0, 0)
        os.dup2(theirs, 2)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interrupts._process, interrupts._came = 0, 0
        interrupts._said = interrupts._watched = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ |= {**variables, LOCK_VARIABLE: str(run.root.resolve())}
        sys.argv[1:] = [str(parent), "run", str(run.root), "--only", side]
        code = 1
        try:
            sides.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = monotonic() + timeout
        while self.poll() is None:
            if monotonic() > deadline:
                raise TimeoutExpired("exgrpo", timeout)
            sleep(0.01)
        return self.returncode


sides._start = Forked
