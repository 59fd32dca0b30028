"""Array tasks, killed and doubled, make the tables of a single task."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import polars as pl
from polars.testing import assert_frame_equal

from array_tasks import server, slurm, start
from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.state import describe_step
from small_runs import parts

TASKS = 4
STAGES = {"rollout": "rollouts", "verify": "verdicts", "score": "scores"}
SETTINGS = [
    "--recipe", "recipes/demo.toml", "--set", "curate.questions=11", "--set", "rollout.samples=3",
    "--set", "rollout.questions_per_part=1", "--set", "rollout.max_new_tokens=48",
    "--set", "rollout.engine=transformers", "--set", "curate.start_success=0.0",
    "--set", "curate.store_before_start=true", "--set", "verify.workers=1",
]  # fmt: skip


def test_an_array_with_a_killed_and_a_doubled_task_makes_the_tables_of_one(
    demo_model: Path, tmp_path: Path
) -> None:
    """Step 1 of a run, so that there are replay groups and candidates to score."""
    context = server()

    def finish(*commands: list[str], killed: bool = False, **env: str) -> None:
        process = start(context, commands, killed=killed, **env)
        process.join(300)
        assert process.exitcode == (-signal.SIGKILL if killed else 0)

    single, array = RunDir(tmp_path / "single"), RunDir(tmp_path / "array")
    begin = ["init", str(single.root), *SETTINGS, "--model", str(demo_model)]
    finish(begin, *([stage, str(single.root), "--step", "0"] for stage in (*STAGES, "curate")))
    shutil.copytree(demo_model, single.policy(1))  # a policy that learned nothing in step 0
    shutil.copytree(single.root, array.root)
    finish(*([stage, str(single.root), "--step", "1"] for stage in STAGES))

    recipe = load_recipe(single.recipe)
    for stage, kind in STAGES.items():
        words = [stage, str(array.root), "--step", "1"]
        folder: Path = getattr(array, kind)(1)
        finish(words, killed=True, **slurm(1, TASKS))
        assert [file.name for file in folder.glob("part-*")] == ["part-00001-of-00011.parquet"]
        assert describe_step(array, 1, recipe)["stages"][stage]["writing"] == [5]
        kept = (folder / "part-00001-of-00011.parquet").stat().st_mtime_ns
        twins = [start(context, [words], **slurm(3, TASKS)) for _ in range(2)]
        for twin in twins:
            twin.join(300)
            assert twin.exitcode == 0
        for task in (2, 1, 0):  # the killed one again, among the others
            finish(words, **slurm(task, TASKS))
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
