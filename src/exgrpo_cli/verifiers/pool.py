"""Worker processes that judge answers under hard limits.

The parent ends and replaces a worker that is over its time; the others go on. Time counts from
when the worker has imported what it needs and gets the answer. A worker serves one verifier. None
outlives its parent: not a normal end, not Ctrl-C, not ``kill -9``.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.machine import cores, open_standard_descriptors
from exgrpo_cli.verifiers import Verdict, check_verifier, is_function, takes_metadata
from exgrpo_cli.verifiers.processes import START_LIMIT, Queue, Server, Task, Worker
from exgrpo_cli.verifiers.sure import equal_numbers

_REMEMBERED = 500_000  # verdicts in the cache
_LOST = 3  # workers that end before they are ready, one after another, until that is the verdict
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
    """The problem's metadata, for those that take it."""
    whole: bool = False
    """``extracted`` is running text, in which the verifier itself finds the answer (``math``)."""


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
        self._size = workers or len(cores())
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._server: Server | None = None
        self._workers: list[Worker] = []
        open_standard_descriptors()
        self._selector = selectors.DefaultSelector()
        self._verdicts: dict[bytes, Verdict] = {}
        self._lost: Counter[str] = Counter()  # workers that died before they were ready, in a row

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.end()
        while self._workers:
            self._remove(self._workers[-1])
        if self._server is not None:
            self._server.close()
            self._server = None

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
        """Judge one answer afresh, with ``parsed_answer`` and ``parsed_extracted`` filled in."""
        check_verifier(job.verifier)
        if job.extracted is None and not is_function(job.verifier):
            return Verdict("no_answer", why="the response gives no final answer")
        return Verdict(**self._run([_request(job) | {"explain": True}])[0])

    def check_golds(self, golds: Sequence[Job]) -> list[str | None]:
        """Why gold answers cannot be judged against; None for those that can.

        Args:
            golds: jobs, of which the response does not matter. A user's function is only loaded.
        """
        for verifier in dict.fromkeys(gold.verifier for gold in golds):
            check_verifier(verifier)
        requests: dict[bytes, dict[str, Any]] = {}
        keys = []
        for gold in golds:
            if is_function(gold.verifier):
                request: dict[str, Any] = {"verifier": gold.verifier, "answer": ""}
            else:
                request = _request(gold)
                del request["extracted"]
            request["check"] = True
            keys.append(_digest(request))
            requests[keys[-1]] = request
        replies = dict(zip(requests, self._run(list(requests.values())), strict=True))
        return [
            reply["fault"] if "fault" in reply else str(reply["why"])
            for reply in map(replies.__getitem__, keys)
        ]

    # --- the loop over processes ----------------------------------------------------------------

    def _run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have all requests answered, in order; a reply holds Verdict's fields, or ``fault``."""
        queue = Queue(
            [
                Task(
                    index,
                    request["verifier"],
                    request["answer"],
                    (json.dumps(request) + "\n").encode("ascii"),
                )
                for index, request in enumerate(requests)
            ]
        )
        replies: dict[int, dict[str, Any]] = {}
        try:
            self._take_in(0.0, queue, replies)  # some may have died since the last call
            while len(replies) < len(requests):
                self._hand_out(queue)
                self._start(queue)
                nearest = min(worker.deadline for worker in self._workers if _is_pending(worker))
                self._take_in(max(0.0, nearest - time.monotonic()), queue, replies)
                self._end_overdue(replies)
        except BaseException:
            # also Ctrl-C: what is half read cannot be used again
            self.close()
            raise
        return [replies[index] for index in range(len(requests))]

    def _hand_out(self, queue: Queue) -> None:
        for worker in list(self._workers):
            if _is_pending(worker):
                continue
            held = {other.gold for other in self._workers}
            task = queue.take(worker.verifier, worker.gold, held)
            if task is not None:
                try:
                    worker.send(task, self._timeout)
                except OSError:  # it had died before: not the task's doing
                    self._remove(worker)
                    queue.put_back(task)

    def _start(self, queue: Queue) -> None:
        """Start workers for what waits, in the places of idle ones of other verifiers too."""
        for verifier, count in queue.counts().items():
            coming = sum(w.verifier == verifier and not w.ready for w in self._workers)
            for _ in range(count - coming):
                if len(self._workers) >= self._size:
                    idle = next((w for w in self._workers if not _is_pending(w)), None)
                    if idle is None:
                        return
                    self._remove(idle)
                self._fork(verifier)

    def _fork(self, verifier: str) -> None:
        for last in (False, True):
            try:
                if self._server is None:
                    self._server = Server(self._memory_mb)
                worker = self._server.start(verifier)
                break
            except OSError as error:
                if self._server is not None:
                    self._server.close()  # it has ended, perhaps killed for memory
                    self._server = None
                if last:
                    raise StageError(f"a verifier worker cannot be started: {error}") from error
        self._workers.append(worker)
        self._selector.register(worker.keeper, selectors.EVENT_READ, worker)

    def _take_in(self, seconds: float, queue: Queue, replies: dict[int, dict[str, Any]]) -> None:
        """Wait so long for messages, and act on them."""
        for key, _ in self._selector.select(seconds):
            worker: Worker = key.data
            arrived = worker.messages()
            for message in [{"died": "killed"}] if arrived is None else arrived:
                if "ready" in message:
                    worker.ready = True
                    self._lost[worker.verifier] = 0
                elif "refused" in message:
                    raise _cannot_load(worker.verifier, message["refused"])
                elif "died" in message:
                    self._died(worker, message, queue, replies)
                elif worker.task is not None:
                    if message.pop("full", False) and worker.answered and not worker.task.crashes:
                        # perhaps with what earlier answers left behind
                        self._remove(worker)
                        worker.task.crashes += 1
                        queue.put_back(worker.task)
                        break
                    replies[worker.task.index] = message
                    worker.task = None
                    worker.answered += 1

    def _died(
        self,
        worker: Worker,
        message: Mapping[str, Any],
        queue: Queue,
        replies: dict[int, dict[str, Any]],
    ) -> None:
        """A worker ended by itself: its answer gets one more try, in a fresh worker."""
        how, task = message["died"], worker.task
        self._remove(worker)
        if not worker.ready:
            self._lost[worker.verifier] += 1
            if self._lost[worker.verifier] >= _LOST:
                raise _cannot_load(worker.verifier, f"the worker died: {how}")
        elif task is not None:
            task.crashes += 0 if message.get("idle") else 1
            if task.crashes < 2:
                queue.put_back(task)
            else:
                replies[task.index] = {"status": "error", "why": f"the worker died: {how}"}

    def _end_overdue(self, replies: dict[int, dict[str, Any]]) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline > now or not _is_pending(worker):
                continue
            if worker.task is None:
                raise _cannot_load(worker.verifier, f"it took longer than {START_LIMIT:g} seconds")
            replies[worker.task.index] = {
                "status": "timeout",
                "seconds": now - worker.started,
                "why": f"not done after {self._timeout:g} seconds",
            }
            self._remove(worker)

    def _remove(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.keeper)
        worker.close()

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        # A worker that died may have been the machine's doing; a later part may ask again.
        if verdict.status == "error":
            return
        if len(self._verdicts) >= _REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[key] = verdict


def _is_pending(worker: Worker) -> bool:
    """Whether it starts, or works on a task."""
    return worker.task is not None or not worker.ready


def _request(job: Job) -> dict[str, Any]:
    """What decides the verdict, and nothing more: equal requests are judged once."""
    request: dict[str, Any] = {"verifier": job.verifier, "answer": job.answer}
    if takes_metadata(job.verifier):
        request["metadata"] = dict(job.metadata or {})
    if is_function(job.verifier):
        return request | {"response": job.response}
    return request | {"extracted": job.extracted} | ({"whole": True} if job.whole else {})


def _digest(request: dict[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).digest()


def _cannot_load(verifier: str, reason: str) -> InputError | StageError:
    if is_function(verifier):
        return InputError(f"verifier {verifier} cannot be loaded: {reason}")
    return StageError(f"verifier {verifier} cannot be loaded: {reason}")
