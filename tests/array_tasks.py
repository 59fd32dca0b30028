"""Array tasks as processes of their own, from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import polars as pl
import torch

import exgrpo_cli.engines.transformers
import exgrpo_cli.policy.update  # noqa: F401
from exgrpo_cli import cli


def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["array_tasks"])
    return context


def start(
    context: ForkServerContext, words: list[str], task: int, tasks: int, *, killed: bool = False
) -> BaseProcess:
    """``exgrpo WORDS`` as one task of a SLURM array.

    ``killed``: by SIGKILL, when half of its second part's file is written.
    """
    process = context.Process(target=_task, args=(words, task, tasks, killed))
    process.start()
    return process


def _task(words: list[str], task: int, tasks: int, killed: bool) -> None:
    torch.set_num_threads(1)
    os.chdir(Path(__file__).parents[1])
    os.environ |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(tasks)}
    os.environ |= {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": str(tasks - 1)}
    if killed:
        _die_in_the_second_file()
    cli.main(words)


def _die_in_the_second_file() -> None:
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
