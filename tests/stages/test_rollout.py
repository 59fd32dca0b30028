"""The rollout stage: what a row says, and what a killed task leaves to the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Request
from exgrpo_cli.engines.transformers import TransformersEngine
from exgrpo_cli.recipe import Recipe, load_recipe
from exgrpo_cli.stages import drafts
from exgrpo_cli.stages.rollout import rollout
from exgrpo_cli.stages.sampling import Asked, completion_row
from exgrpo_cli.step import Step
from rollout_files import Stream


class Reads:
    """A tokenizer, as far as reading goes."""

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def row_of(completion: Completion) -> dict[str, Any]:
    step = Step.of("run", 3)
    return completion_row(step, Asked("p", 1), Request(0, [5], 9), completion, Reads())


def test_a_row_says_where_its_mean_entropy_is_from() -> None:
    tokens, logprobs = [7, 8], [-1.0, -3.0]
    exact = row_of(Completion(0, tokens, logprobs, [0.5, 0.25], "stop", topk_entropy=9.0))
    assert (exact["mean_entropy"], exact["entropy_source"]) == (0.375, "engine")
    estimated = row_of(Completion(0, tokens, logprobs, None, "stop", topk_entropy=1.25))
    assert (estimated["mean_entropy"], estimated["entropy_source"]) == (1.25, "topk")
    sampled = row_of(Completion(0, tokens, logprobs, None, "stop"))
    assert (sampled["mean_entropy"], sampled["entropy_source"]) == (2.0, "logprobs")
    assert sampled["entropies"] is None
    assert sampled["rollout_id"] == "s00003/p/01"


@pytest.fixture
def recipe(guesser: Path) -> Recipe:
    sets = ["rollout.samples=4", "rollout.questions_per_part=3", "rollout.device=cpu"]
    sets += ["rollout.max_new_tokens=24", "rollout.engine=transformers"]
    return load_recipe(None, sets, {"model.path": str(guesser)})


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    rows = [
        {
            "problem_id": f"q{i}",
            "prompt": [{"role": "user", "content": f"{i}+{i + 1}="}],
            "answer": str(2 * i + 1),
            "verifier": "exact",
            "source": "test",
        }
        for i in range(7)
    ]
    path = tmp_path / "problems.parquet"
    tables.write_table("problems", tables.frame("problems", rows), path)
    return path


@pytest.fixture
def inner(guesser: Path, recipe: Recipe) -> TransformersEngine:
    """The demo model."""
    return TransformersEngine(recipe, str(guesser))


def test_rows_are_kept_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = drafts.Drafts([tmp_path / "part.parquet"], "by a policy")
    row = row_of(Completion(0, [7, 8], [-1.0, -3.0], None, "stop"))
    held.add(0, row)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(drafts, "_SECONDS", 0.0)
    held.add(0, {**row, "rollout_id": "s00003/p/02"})
    (file,) = tmp_path.iterdir()
    assert tables.read_table("rollouts", file)["rollout_id"].to_list() == [
        "s00003/p/01", "s00003/p/02",
    ]  # fmt: skip


def test_a_task_that_ends_leaves_its_finished_rows_to_the_next(
    inner: TransformersEngine, guesser: Path, recipe: Recipe, problems: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def run(engine: Stream, out: str, *, name: str = "", force: bool = False) -> pl.DataFrame:
        step = Step.of(
            None, policy=name or str(guesser), problems=problems, rollouts=tmp_path / out
        )
        rollout(step, recipe, engine=lambda _: engine, force=force, log=said.append)
        return tables.read_table("rollouts", tmp_path / out)

    whole = run(Stream(inner), "whole")
    assert whole.height == 28
    with pytest.raises(KeyboardInterrupt):
        run(Stream(inner, 13), "killed")
    kept = [path for path in (tmp_path / "killed").iterdir() if path.name.endswith(".rows")]
    assert kept
    with pytest.raises(KeyboardInterrupt):
        run(Stream(inner, 5), "killed")
    other = Stream(inner, 0)  # another policy has no use for these rows
    (tmp_path / "another").symlink_to(guesser)
    with pytest.raises(KeyboardInterrupt):
        run(other, "killed", name=str(tmp_path / "another"))
    last = Stream(inner)
    again = run(last, "killed")
    finished_parts = len(other.asked)  # rows of parts that were not written yet
    assert len(last.asked) == 28 - 13 - 5
    assert len(last.asked) < finished_parts
    assert "rows that an interrupted task had finished are kept" in said[-1]
    same = ["rollout_id", "token_ids", "text", "finish_reason", "seed", "tokens", "token_hash"]
    assert again.select(same).equals(whole.select(same))
    assert again.columns == whole.columns
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


def test_force_samples_anew(
    inner: TransformersEngine, guesser: Path, recipe: Recipe, problems: Path, tmp_path: Path
) -> None:
    for rows, force in ((3, False), (None, True)):
        engine = Stream(inner, rows)
        try:
            step = Step.of(None, policy=str(guesser), problems=problems, rollouts=tmp_path / "out")
            rollout(step, recipe, engine=lambda _, e=engine: e, force=force)
        except KeyboardInterrupt:
            assert not force
    assert len(engine.asked) == 28
