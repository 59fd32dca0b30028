"""Worker processes that judge answers under hard limits.

The parent kills and replaces a worker that is over its time; the others go on. Time counts from
when the worker has imported what it needs and starts on the answer. No worker outlives its parent:
not a normal end, not Ctrl-C, not ``kill -9``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any

from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.verifiers import Verdict, check_verifier, is_function
from exgrpo_cli.verifiers.sure import equal_numbers

START_LIMIT = 300.0
"""Seconds that starting and importing may take (sympy from a slow network disk, a user's file)."""
_REMEMBERED = 500_000  # verdicts in the cache
_SURE = {
    True: Verdict("ok", reward=1.0, correct=True, why="equal to the gold answer"),
    False: Verdict("ok", why="not equal to the gold answer"),
}


@dataclass(frozen=True)
class Job:
    """One answer to judge."""

    verifier: str
    answer: str
    """The gold answer."""
    extracted: str | None
    """The response's answer; None is ``no_answer``, without any work (except for functions)."""
    response: str = ""
    """The whole response, for a user's function."""
    metadata: Mapping[str, Any] | None = None
    """The problem's metadata, for a user's function."""
    whole: bool = False
    """``extracted`` is running text, in which the verifier itself finds the answer (``math``)."""


def default_workers() -> int:
    """The cores that this process may use (under SLURM those of the job)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """A process with its pipes and what it is doing."""

    def __init__(self, memory_mb: int, timeout: float) -> None:
        # -P: nothing from the current folder may shadow a module. One thread each: the pool is
        # the parallelism, and thread stacks would count against the memory limit.
        threads = {
            f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")
        }
        arguments = (str(os.getpid()), str(memory_mb), str(timeout))
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", "-m", "exgrpo_cli.verifiers.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A fixed hash seed, so that sympy's orderings, and verdicts, do not vary.
            env=os.environ | threads | {"PYTHONHASHSEED": "0"},
            # Not in the terminal's foreground group: a Ctrl-C must not reach a worker that is
            # still starting, where it would print a traceback.
            process_group=0,
        )
        self.stdin: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        self.stdout: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        self.buffer = b""
        self.ready = False
        self.task: _Task | None = None
        self.gold: str | None = None  # of its last task
        self.answered = 0
        self.started: float | None = None  # when it began on the task itself
        self.deadline = time.monotonic() + START_LIMIT

    def send(self, task: _Task) -> None:
        self.task = task
        self.gold = task.gold
        self.started = None
        self.deadline = time.monotonic() + START_LIMIT
        data = memoryview(task.line)
        while data:
            data = data[self.stdin.write(data) :]

    def messages(self) -> list[dict[str, Any]] | None:
        """What has arrived; None when the process has closed its end."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        # its whole group, also when it is dead itself: a user's function may have started processes
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


@dataclass
class _Task:
    index: int
    verifier: str
    gold: str
    line: bytes
    crashes: int = 0


class _Queue:
    """Tasks, the longest first, but those of one gold answer for one worker, which parses it once.

    Long answers mostly take the longest, and at the end no worker should wait for another.
    """

    def __init__(self, tasks: Iterable[_Task]) -> None:
        self._by_gold: dict[str, deque[_Task]] = {}
        self._count = 0
        for task in sorted(tasks, key=lambda task: len(task.line), reverse=True):
            self._by_gold.setdefault(task.gold, deque()).append(task)
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def take(self, last: str | None, held: Collection[str | None]) -> _Task:
        """The next task of the gold ``last``, else of the first that is not ``held`` by another
        worker, else of the first."""
        gold = last
        if gold is None or gold not in self._by_gold:
            gold = next((g for g in self._by_gold if g not in held), next(iter(self._by_gold)))
        tasks = self._by_gold[gold]
        task = tasks.popleft()
        if not tasks:
            del self._by_gold[gold]
        self._count -= 1
        return task

    def put_back(self, task: _Task) -> None:
        """Return a task whose worker died; it comes next of its gold."""
        self._by_gold.setdefault(task.gold, deque()).appendleft(task)
        self._count += 1


class Pool:
    """Verifiers in worker processes; a context manager, to be used from one thread.

    Workers stay for the next call. One whose memory is full is replaced and its answer tried again.

    Args:
        workers: how many processes; by default as many as cores. They start when there is work.
        timeout: hard limit for one answer, seconds.
        memory_mb: what a worker may allocate beyond its imports, MiB (not enforced on macOS).
    """

    def __init__(
        self, workers: int | None = None, timeout: float = 5.0, memory_mb: int = 2048
    ) -> None:
        self._size = workers or default_workers()
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._verdicts: dict[bytes, Verdict] = {}
        self._lost = 0  # workers that died before they were ready, in a row

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker."""
        while self._workers:
            self._remove(self._workers[-1])

    def forget_timeouts(self) -> None:
        """Ask again for what took too long: the machine may have been busy."""
        self._verdicts = {k: v for k, v in self._verdicts.items() if v.status != "timeout"}

    def judge(self, jobs: Sequence[Job]) -> list[Verdict]:
        """Judge answers; equal jobs are judged once, also over several calls.

        No worker is asked about two plain numbers.

        Returns:
            A verdict a job, in order. ``seconds`` is 0 where the verdict was known already.

        Raises:
            InputError: an unknown verifier, or a user's file that cannot be loaded.
            StageError: workers cannot be started here.
        """
        for verifier in dict.fromkeys(job.verifier for job in jobs):
            check_verifier(verifier)
        verdicts: list[Verdict | None] = [None] * len(jobs)
        waiting: dict[bytes, list[int]] = {}
        requests: list[dict[str, Any]] = []
        for index, job in enumerate(jobs):
            if job.extracted is None and not is_function(job.verifier):
                verdicts[index] = Verdict("no_answer", why="the response gives no final answer")
                continue
            if job.verifier == "math" and job.extracted is not None and not job.whole:
                equal = equal_numbers(job.answer, job.extracted)
                if equal is not None:
                    verdicts[index] = _SURE[equal]
                    continue
            request = _request(job)
            key = _digest(request)
            known = self._verdicts.get(key)
            if known is not None:
                verdicts[index] = replace(known, seconds=0.0)
            elif key in waiting:
                waiting[key].append(index)
            else:
                waiting[key] = [index]
                requests.append(request)
        replies = self._run(requests)
        for (key, indices), reply in zip(waiting.items(), replies, strict=True):
            verdict = Verdict(**reply)
            self._remember(key, verdict)
            for position, index in enumerate(indices):
                verdicts[index] = verdict if position == 0 else replace(verdict, seconds=0.0)
        return [verdict for verdict in verdicts if verdict is not None]

    def explain(self, job: Job) -> Verdict:
        """Judge one answer afresh, with ``parsed_answer`` and ``parsed_extracted`` filled in.

        Raises:
            InputError, StageError: see :meth:`judge`.
        """
        check_verifier(job.verifier)
        if job.extracted is None and not is_function(job.verifier):
            return Verdict("no_answer", why="the response gives no final answer")
        return Verdict(**self._run([_request(job) | {"explain": True}])[0])

    def check_golds(self, golds: Sequence[tuple[str, str]]) -> list[str | None]:
        """Why gold answers cannot be judged against; None for those that can.

        Args:
            golds: pairs of verifier and gold answer. A user's function is only loaded.

        Raises:
            InputError, StageError: see :meth:`judge`.
        """
        for verifier in dict.fromkeys(verifier for verifier, _ in golds):
            check_verifier(verifier)
        faults: dict[tuple[str, str], str | None] = {}
        requests = []
        for gold in dict.fromkeys(golds):
            verifier, answer = gold
            key = (verifier, "") if is_function(verifier) else gold
            if key not in faults:
                faults[key] = None
                requests.append((key, {"verifier": verifier, "answer": answer, "check": True}))
        replies = self._run([request for _, request in requests])
        for (key, _), reply in zip(requests, replies, strict=True):
            faults[key] = reply["fault"] if "fault" in reply else str(reply["why"])
        return [faults[(v, "") if is_function(v) else (v, answer)] for v, answer in golds]

    # --- the loop over processes ----------------------------------------------------------------

    def _run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have all requests answered, in order; a reply holds Verdict's fields, or ``fault``."""
        queue = _Queue(
            _Task(
                index,
                request["verifier"],
                request["answer"],
                (json.dumps(request) + "\n").encode("ascii"),
            )
            for index, request in enumerate(requests)
        )
        replies: dict[int, dict[str, Any]] = {}
        for worker in list(self._workers):
            if worker.task is None and worker.process.poll() is not None:
                self._remove(worker)  # died since the last call
        try:
            while len(replies) < len(requests):
                busy = sum(worker.task is not None for worker in self._workers)
                while len(self._workers) < min(self._size, busy + len(queue)):
                    self._start()
                for worker in list(self._workers):
                    if queue and worker.ready and worker.task is None:
                        self._send(worker, queue)
                self._wait(queue, replies)
        except BaseException:
            # also Ctrl-C: what is half read cannot be used again
            self.close()
            raise
        return [replies[index] for index in range(len(requests))]

    def _wait(self, queue: _Queue, replies: dict[int, dict[str, Any]]) -> None:
        """Take in what arrives until the next deadline, then kill who is over it."""
        pending = [w for w in self._workers if w.task is not None or not w.ready]
        if not pending:
            return
        nearest = min(worker.deadline for worker in pending)
        for key, _ in self._selector.select(max(0.0, nearest - time.monotonic())):
            self._receive(key.data, queue, replies)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline > now or (worker.ready and worker.task is None):
                continue
            if worker.started is None:
                what = worker.task.verifier if worker.task else "a verifier worker"
                raise _cannot_load(what, f"it took longer than {START_LIMIT:g} seconds")
            assert worker.task is not None
            replies[worker.task.index] = {
                "status": "timeout",
                "seconds": now - worker.started,
                "why": f"not done after {self._timeout:g} seconds",
            }
            self._remove(worker)

    def _receive(self, worker: _Worker, queue: _Queue, replies: dict[int, dict[str, Any]]) -> None:
        messages = worker.messages()
        if messages is None:
            self._crashed(worker, queue, replies)
            return
        for message in messages:
            if "ready" in message:
                worker.ready = True
                self._lost = 0
            elif "started" in message:
                worker.started = time.monotonic()
                worker.deadline = worker.started + self._timeout
            elif "refused" in message:
                assert worker.task is not None
                raise _cannot_load(worker.task.verifier, message["refused"])
            elif worker.task is not None:
                if message.pop("full", False) and worker.answered and not worker.task.crashes:
                    # perhaps with what earlier answers left behind
                    self._try_afresh(worker, queue)
                    return
                replies[worker.task.index] = message
                worker.task = None
                worker.answered += 1

    def _crashed(self, worker: _Worker, queue: _Queue, replies: dict[int, dict[str, Any]]) -> None:
        """A worker died by itself: its answer gets one more try, in a fresh worker."""
        task, began = worker.task, worker.started is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)  # for its own exit status; its pipe may close a little earlier
        self._remove(worker)
        code = worker.process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if task is None:
            self._lost += 0 if worker.ready else 1
            if self._lost >= 3:
                raise StageError(f"verifier workers cannot be started: {how}")
            return
        task.crashes += 1
        if task.crashes < 2:
            queue.put_back(task)
        elif began:
            replies[task.index] = {"status": "error", "why": f"the worker died: {how}"}
        else:
            raise _cannot_load(task.verifier, f"the worker died: {how}")

    def _try_afresh(self, worker: _Worker, queue: _Queue) -> None:
        task = worker.task
        assert task is not None
        self._remove(worker)
        task.crashes += 1
        queue.put_back(task)

    def _send(self, worker: _Worker, queue: _Queue) -> None:
        task = queue.take(worker.gold, {other.gold for other in self._workers})
        try:
            worker.send(task)
        except BrokenPipeError:  # it had died before: not the task's doing
            self._remove(worker)
            queue.put_back(task)

    def _start(self) -> None:
        try:
            worker = _Worker(self._memory_mb, self._timeout)
        except OSError as error:
            raise StageError(f"a verifier worker cannot be started: {error}") from error
        self._workers.append(worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.stdout)
        worker.kill()

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        # A worker that died may have been the machine's doing; a later part may ask again.
        if verdict.status == "error":
            return
        if len(self._verdicts) >= _REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[key] = verdict


def _request(job: Job) -> dict[str, Any]:
    """What decides the verdict, and nothing more: equal requests are judged once."""
    request: dict[str, Any] = {"verifier": job.verifier, "answer": job.answer}
    if is_function(job.verifier):
        return request | {"response": job.response, "metadata": dict(job.metadata or {})}
    return request | {"extracted": job.extracted} | ({"whole": True} if job.whole else {})


def _digest(request: dict[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).digest()


def _cannot_load(verifier: str, reason: str) -> InputError | StageError:
    if is_function(verifier):
        return InputError(f"verifier {verifier} cannot be loaded: {reason}")
    return StageError(f"verifier {verifier} cannot be loaded: {reason}")
