"""What keeps a run directory true to itself: its recipe, its problems, its log, its one writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, load_recipe, with_absolute_paths
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.prepare import adopt, import_into, prepare
from exgrpo_cli.step import Step

ROOT = Path(__file__).parents[1]


def recipe(model: Path, *sets: str) -> Recipe:
    problems = ROOT / "data/arithmetic/heldout.jsonl"
    first = [f"problems.path={problems}", "problems.limit=6"]
    given = load_recipe(ROOT / "recipes/demo.toml", [*first, *sets], {"model.path": str(model)})
    return with_absolute_paths(given)  # as a run keeps it


@pytest.fixture
def begun(guesser: Path, tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    prepare(run, recipe(guesser))
    return run


def test_a_run_begins_with_its_recipe_and_problems(begun: RunDir, guesser: Path) -> None:
    assert load_recipe(begun.recipe) == recipe(guesser)
    assert pl.read_parquet(begun.problems).height == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("problems.limit=5", "problems.limit was 6 and cannot become 5"),
        ("rollout.top_p=0.9", "rollout.top_p is gone"),
        ("rollout.temperature=0.0", "temperature"),
        ("rollout.samples=1", "a success retires its question"),
    ],
)
def test_a_refused_change_leaves_the_recipe(
    begun: RunDir, guesser: Path, change: str, words: str
) -> None:
    before = begun.recipe.read_bytes()
    with pytest.raises(InputError, match=words):
        prepare(begun, recipe(guesser, change))
    assert begun.recipe.read_bytes() == before


def test_too_few_positions_are_said(guesser: Path, tmp_path: Path) -> None:
    said: list[str] = []
    long = recipe(guesser, "rollout.max_new_tokens=100000")
    prepare(RunDir(tmp_path / "run"), long, said.append)
    assert sum("positions" in line and "cut off" in line for line in said) == 1


def test_an_allowed_change_is_said_and_kept(begun: RunDir, guesser: Path) -> None:
    said: list[str] = []
    changed = recipe(guesser, "train.learning_rate=2e-5")
    prepare(begun, changed, said.append)
    assert said == ["recipe: train.learning_rate was 0.0001, is now 2e-05"]
    assert load_recipe(begun.recipe) == changed


def test_lora_cannot_change_after_the_first_policy(begun: RunDir, guesser: Path) -> None:
    prepare(begun, recipe(guesser, "lora.rank=8"))
    begun.policy(1).mkdir(parents=True)
    with pytest.raises(InputError, match=r"lora\.rank was 8 and cannot become 4"):
        prepare(begun, recipe(guesser, "lora.rank=4"))


def test_without_problems_nothing_is_begun(guesser: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(InputError, match="no problems yet"):
        prepare(run, load_recipe(None, [], {"model.path": str(guesser)}))
    assert not run.root.exists()


def test_import_never_writes_over_its_source(tmp_path: Path, guesser: Path) -> None:
    source = tmp_path / "mine.parquet"
    pl.DataFrame({"prompt": ["1+1="], "answer": ["2"]}).write_parquet(source)
    before = source.read_bytes()
    for out, words in (
        (source, "is the source itself"),
        (tmp_path / "out.jsonl", "a .parquet file"),
        (tmp_path, "a .parquet file"),
    ):
        with pytest.raises(InputError, match=words):
            import_into(out, source, Recipe(), None, print)
    assert source.read_bytes() == before


def test_a_limit_on_training_problems_is_none_on_held_out_ones(tmp_path: Path) -> None:
    settings = load_recipe(None, ["problems.limit=3", "problems.format=plain"])
    source = ROOT / "data/arithmetic/ood.jsonl"
    for held_out, count in ((False, 3), (True, 200)):
        report = import_into(None, source, settings, None, lambda _: None, held_out=held_out)
        assert report["problems"] == count


def test_a_second_writer_is_refused(begun: RunDir) -> None:
    with begun.locked(), pytest.raises(InputError, match="another exgrpo"), begun.locked():
        pass
    with begun.locked():  # given back
        pass


def verdict(rollout_id: str) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "reward": 1.0, "correct": True, "extracted": "2",
        "status": "ok", "verifier": "math", "seconds": 0.0,
    }  # fmt: skip


def loose_rollout(rollout_id: str) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "step": 0, "problem_id": "a", "sample": 0, "role": "fresh",
        "policy": "p", "prompt_ids": [1], "token_ids": [2], "text": "2", "logprobs": [-0.1],
        "entropies": [0.1], "mean_entropy": 0.1, "entropy_source": "engine",
        "mean_logprob": -0.1, "tokens": 1, "token_hash": "x", "finish_reason": "stop", "seed": 1,
    }  # fmt: skip


def test_wrong_loose_files_are_refused_before_any_is_taken_in(
    begun: RunDir, tmp_path: Path
) -> None:
    rollouts, verdicts = tmp_path / "r.parquet", tmp_path / "v.parquet"
    tables.write_table("rollouts", tables.frame("rollouts", [loose_rollout("one")]), rollouts)
    tables.write_table("verdicts", tables.frame("verdicts", [verdict("other")]), verdicts)
    with pytest.raises(InputError, match="have no verdict here"):
        adopt(Step.of(begun, rollouts=rollouts, verdicts=verdicts))
    assert not begun.rollouts(0).exists()
    tables.write_table("verdicts", tables.frame("verdicts", [verdict("one")]), verdicts)
    adopt(Step.of(begun, rollouts=rollouts, verdicts=verdicts))
    adopt(Step.of(begun, rollouts=rollouts, verdicts=verdicts))  # the same again is fine
    assert begun.rollouts(0).joinpath("part-00000-of-00001.parquet").exists()
    tables.write_table(
        "verdicts", tables.frame("verdicts", [verdict("one") | {"reward": 0.0}]), verdicts
    )
    with pytest.raises(InputError, match="is there already and differs"):
        adopt(Step.of(begun, rollouts=rollouts, verdicts=verdicts))


def test_sampling_does_not_change_within_a_step(begun: RunDir, guesser: Path) -> None:
    warm, cold = recipe(guesser), recipe(guesser, "rollout.temperature=0.5")
    prepare(begun, cold)  # nothing is sampled yet
    begun.rollouts(0).mkdir(parents=True)
    prepare(begun, warm)
    (begun.rollouts(0) / ".part-00000-of-00002.parquet.0123.abcd.rows").touch()  # a killed task's
    with pytest.raises(InputError, match=r"rollout.temperature was 1.0 when step 0 was sampled"):
        prepare(begun, cold)
    assert load_recipe(begun.recipe) == warm
    begun.policy(1).mkdir(parents=True)  # step 0 is trained
    prepare(begun, cold)
