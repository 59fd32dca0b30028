"""Processes of ``exgrpo`` that are forked from one that has imported torch and the rest already.

Each has arguments, an environment, a folder, streams and an exit code of its own, as a process
started by a shell has; what it lacks is seconds of importing. Where the start of a process is what
is tested (and with vLLM, which forks too) tests start a real one.

``python zygote.py serve SOCKET`` is the server, ``python zygote.py SOCKET ARGUMENT…`` stands in for
the command ``exgrpo`` on a PATH.
"""

from __future__ import annotations

import json
import os
import socket
import sys

PRELOADED = [
    "duckdb",
    "polars",
    "exgrpo_cli.cli",
    "exgrpo_cli.inspect.sql",
    "exgrpo_cli.engines.transformers",
    "exgrpo_cli.runs.loop",
    "exgrpo_cli.training.update",
    "exgrpo_cli.inspect.report",
    "exgrpo_cli.stages.curate",
    "exgrpo_cli.stages.evaluate",
    "exgrpo_cli.stages.rollout",
    "exgrpo_cli.stages.score",
    "exgrpo_cli.stages.train",
    "exgrpo_cli.stages.verify",
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
]


class Child:
    """A process of the server's, as its client sees it."""

    def __init__(
        self, path: str, arguments: list[str], streams: tuple[int, int, int], **more: object
    ) -> None:
        here = os.readlink("/proc/self/cwd")  # noqa: PTH115 (pathlib is slow to import)
        request = {"argv": arguments, "cwd": here, "env": dict(os.environ)} | more
        self.returncode: int | None = None
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(path)
        socket.send_fds(self.connection, [json.dumps(request).encode()], streams)
        self.pid = int(self.connection.recv(99))

    def wait(self, timeout: float | None = 600) -> int:
        """Its exit code, negative where a signal ended it."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.connection.recv(99))
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except BlockingIOError:
            return None


def serve(path: str) -> None:
    import ctypes
    import importlib
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end with the tests
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _handle(connection)
            os._exit(0)
        connection.close()


def _handle(connection: socket.socket) -> None:
    """Fork the process that was asked for, wait for it, and say how it ended."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _run(json.loads(data), streams)
    for stream in streams:
        os.close(stream)
    connection.send(str(pid).encode())
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _run(request: dict, streams: list[int]) -> None:
    import atexit
    import threading
    import traceback

    if request.get("session"):
        os.setsid()
    for to, stream in enumerate(streams):
        os.dup2(stream, to)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["argv"]
    code: object = 1
    try:
        exec(request.get("before", ""), {"__name__": "before"})
        from exgrpo_cli.__main__ import main

        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(Child(sys.argv[1], sys.argv[2:], (0, 1, 2)).wait(None))
