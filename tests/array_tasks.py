"""Array tasks as processes of their own, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# What the tasks would spend most of their time on. Installed modules alone: the server does not
# know of this folder.
_PRELOADED = [
    "duckdb",
    "polars",
    "exgrpo_cli.cli",
    "exgrpo_cli.engines.transformers",
    "exgrpo_cli.training.update",
    "exgrpo_cli.stages.curate",
    "exgrpo_cli.verifiers.pool",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
]


def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def start(
    context: ForkServerContext,
    commands: Sequence[Sequence[str]],
    *,
    killed: bool = False,
    **env: str,
) -> BaseProcess:
    """``exgrpo`` command lines, one after the other, in a process with these variables.

    ``killed``: by SIGKILL, when half of its second Parquet file is written.
    """
    process = context.Process(target=_run, args=(commands, env, killed))
    process.start()
    return process


def slurm(task: int, tasks: int) -> dict[str, str]:
    """SLURM's variables of an array's task."""
    numbers = {"ID": task, "COUNT": tasks, "MIN": 0, "MAX": tasks - 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


def _run(commands: Sequence[Sequence[str]], env: dict[str, str], killed: bool) -> None:
    from exgrpo_cli import cli

    os.chdir(Path(__file__).parents[1])
    os.environ |= env
    if killed:
        _die_in_the_second_file()
    for words in commands:
        try:
            cli.main(list(words))
        except SystemExit as ended:
            if ended.code:
                raise


def _die_in_the_second_file() -> None:
    import polars as pl

    write = pl.DataFrame.write_parquet
    files = 0

    def half(frame: pl.DataFrame, file: Path, **options: Any) -> None:
        nonlocal files
        files += 1
        write(frame, file, **options)
        if files == 2:
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    pl.DataFrame.write_parquet = half  # type: ignore[method-assign,assignment]
