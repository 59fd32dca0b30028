"""Array tasks, killed and doubled, make the tables of a single task."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from polars.testing import assert_frame_equal

from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.state import describe_step
from making import parts, settings, small_run

TASKS = 4
STAGES = {"rollout": "rollouts", "verify": "verdicts", "score": "scores"}

# A process dies by SIGKILL when half of its second Parquet file is written.
DIES = """
import os, signal
import polars as pl

write, files = pl.DataFrame.write_parquet, []

def half(frame, file, **options):
    files.append(file)
    write(frame, file, **options)
    if len(files) == 2:
        os.truncate(file.name, os.stat(file.name).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

pl.DataFrame.write_parquet = half
"""


def slurm(task: int) -> dict[str, str]:
    """SLURM's variables of an array's task."""
    numbers = {"ID": task, "COUNT": TASKS, "MIN": 0, "MAX": TASKS - 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


def test_an_array_with_a_killed_and_a_doubled_task_makes_the_tables_of_one(
    exgrpo: Callable[..., Any], guesser: Path, tmp_path: Path
) -> None:
    """Step 1 of a run, so that there are replay groups and candidates to score."""
    single, array = RunDir(tmp_path / "single"), RunDir(tmp_path / "array")
    sets = settings("curate.questions=11", "rollout.samples=3", "rollout.questions_per_part=1")
    exgrpo("init", single.root, *small_run(guesser), *sets)
    for stage in (*STAGES, "curate"):
        exgrpo(stage, single.root, "--step", 0)
    shutil.copytree(guesser, single.policy(1))  # a policy that learned nothing in step 0
    shutil.copytree(single.root, array.root)
    for stage in STAGES:
        exgrpo(stage, single.root, "--step", 1)

    recipe = load_recipe(single.recipe)
    for stage, kind in STAGES.items():
        words = [stage, array.root, "--step", 1]
        folder: Path = getattr(array, kind)(1)
        exgrpo(*words, before=DIES, code=-signal.SIGKILL, **slurm(1))
        assert [file.name for file in folder.glob("part-*")] == ["part-00001-of-00011.parquet"]
        assert describe_step(array, 1, recipe)["stages"][stage]["writing"] == [5]
        kept = (folder / "part-00001-of-00011.parquet").stat().st_mtime_ns
        twins = [exgrpo.start(*words, **slurm(3)) for _ in range(2)]
        assert [twin.wait() for twin in twins] == [0, 0]
        for task in (2, 1, 0):  # the killed one again, among the others
            exgrpo(*words, **slurm(task))
        assert (folder / "part-00001-of-00011.parquet").stat().st_mtime_ns == kept
        assert describe_step(array, 1, recipe)["stages"][stage]["complete"]
        assert_same_tables(getattr(single, kind)(1), folder)
    assert set(parts(array.rollouts(1))["role"]) == {"fresh", "replay"}
    assert list(array.scores(1).glob("replay-*"))


def assert_same_tables(one: Path, other: Path) -> None:
    """The same files with the same rows; how long a verdict took aside."""
    names = [sorted(file.name for file in folder.glob("*.parquet")) for folder in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        frames = (pl.read_parquet(folder / name) for folder in (one, other))
        a, b = (frame.drop("seconds", strict=False) for frame in frames)
        assert_frame_equal(a, b, check_exact=True)
