"""What vLLM's processes write while it starts, and which line of it says why it did not."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator

from exgrpo_cli import interrupts

_DRAIN_SECONDS = 2.0
_KEPT_BYTES = 1 << 20
_LONGEST = 300

# "(EngineCore pid=7) ERROR 12-01 10:00:00 [core.py:12] ", in part or whole, and colours
_PREFIX = re.compile(
    r"\x1b\[[0-9;]*m|^(\([^()]*\) )?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)")
_CAUSED = "The above exception was the direct cause"
# One process saying that another has failed.
_HEARSAY = re.compile(r"(?i)(engine core|workerproc) initialization failed|root cause|EOFError$")
_SPOKEN = re.compile(  # what C++ says, without an exception's name
    r"(?i)no space left on device|out of memory|bad_alloc|bus error|cannot allocate memory"
    r"|creating shared memory segment"
)

_SHM = "/dev/shm is too small or full (df -h /dev/shm; in a container: --shm-size=16g)"
_LENGTHS = "rollout.max_prompt_tokens and rollout.max_new_tokens"
_MENDS = {
    r"/dev/shm|shm_open|psm_|torch_\d+|shared memory|bus error|signal 7\b": _SHM,
    r"no space left": "a disk is full (df -h /tmp ~/.cache)",
    r"kv.?cache|cache blocks|max seq len|max_model_len": (
        f"raise rollout.gpu_memory_utilization, or lower {_LENGTHS}"
    ),
    r"free memory on device": (
        "lower rollout.gpu_memory_utilization, or end what else uses the GPU (nvidia-smi)"
    ),
    r"out of memory|outofmemory": (
        "end what else uses the GPU (nvidia-smi), or split the model: rollout.tensor_parallel"
    ),
    r"signal 9\b|bad_alloc|cannot allocate memory|MemoryError": (
        "this machine's memory ran out (free -h)"
    ),
    r"not supported for now|no vllm implementation": "--engine transformers opens more models",
    r"divisible by tensor parallel|tensor_parallel_size": "see rollout.tensor_parallel",
}


@contextlib.contextmanager
def heard(show: bool) -> Iterator[Callable[[], str]]:
    """Listen to the processes that are started within the block, on their descriptors 1 and 2.

    While it lasts, what they write is kept, and shown only where that is asked for; later they
    write to our descriptor 2, as before. Python's own ``sys.stderr`` is another one (see
    :mod:`exgrpo_cli.interrupts`), so that our lines are not held up.

    Yields:
        A function for what was written (the last 1 MiB), to be called after the block.
    """
    reading, writing = os.pipe()
    before = {number: _copy(number) for number in (1, 2)}
    out = os.dup(before[2])
    said = bytearray()
    starting = True

    def listen() -> None:
        with contextlib.suppress(OSError):  # nobody is left to read it
            while piece := os.read(reading, 1 << 16):
                if starting:
                    said.extend(piece)
                    del said[:-_KEPT_BYTES]
                if (show or not starting) and not interrupts.came():  # how they end is no news
                    os.write(out, piece)
        os.close(reading)
        os.close(out)

    thread = threading.Thread(target=listen, daemon=True)

    def text() -> str:
        thread.join(_DRAIN_SECONDS)  # Python's resource tracker keeps the pipe open
        return said.decode("utf-8", "replace")

    with contextlib.suppress(OSError, AttributeError):
        sys.stdout.flush()
    for number in before:
        os.dup2(writing, number)
    os.close(writing)
    thread.start()
    failed = True
    try:
        yield text
        failed = False
    finally:
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.flush()
        for number, kept in before.items():
            if number == 1 or not interrupts.came():  # then 2 has been silenced
                os.dup2(kept, number)
            os.close(kept)
        starting = failed  # what a start that failed says late belongs to it


def _copy(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # is closed
        return os.open(os.devnull, os.O_WRONLY)


def root_cause(text: str) -> str:
    """The line of processes' output that says why they failed; empty where none does.

    Of chained exceptions (``raise … from …``) it is the first, the cause; else the last one that
    was raised, unless it only tells of another process's failure.
    """
    found: list[str] = []
    caused = False
    for line in text.splitlines():
        line = _PREFIX.sub("", line.rstrip())
        if line.startswith(_CAUSED):
            caused = True
        elif _EXCEPTION.match(line) or _SPOKEN.search(line):
            if not caused and not _HEARSAY.search(line):
                found.append(line.strip())
            caused = caused and not _EXCEPTION.match(line)
    telling = [line for line in found if _SPOKEN.search(line)]
    return " ".join((telling or found or [""])[-1].split())


def explained(error: str, text: str) -> str:
    """Why vLLM did not start and what can be done, in one line."""
    cause = root_cause(text)
    ended = re.search(r": -(\d+)", error)  # Failed core proc(s): {'EngineCore': -9}
    if not cause and ended:
        cause = f"a process of it was ended by signal {ended[1]}"
    cause = (cause or error).removeprefix("Value error, ")
    cause = re.sub(r"\. Supported architectures: .*", "", cause)  # hundreds
    mend = next((m for pattern, m in _MENDS.items() if re.search(f"(?i){pattern}", cause)), "")
    if len(cause) > _LONGEST:
        cause = cause[:_LONGEST].rstrip() + " ..."
    return f"{cause.rstrip('.')}; {mend or 'VLLM_LOGGING_LEVEL=INFO shows all that it says'}"
