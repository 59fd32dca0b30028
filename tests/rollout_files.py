"""Small problems and rollouts tables, for tests of the verify stage; an engine that ends."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Engine, Request, Sampling
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.stages import verify as stage
from exgrpo_cli.step import Step

LIMITS = {"workers": 1, "timeout": 1.0}
RECIPE = parse_recipe({"verify": LIMITS}, "test")


def verify(
    rollouts: Path, problems: Path, out: Path, recipe: Recipe, log: Log = quiet, **options: Any
) -> dict[str, Any]:
    """The stage over loose files; its counts."""
    step = Step.of(None, rollouts=rollouts, problems=problems, verdicts=out)
    result = stage.verify(step, recipe, log=log, **options)
    parts = {"parts_done": result.done, "parts_skipped": result.skipped}
    return {**result.metrics, **parts, "notes": result.notes}


def explain(
    rollouts: Path, problems: Path, rollout_id: str, recipe: Recipe, verifier: str | None = None
) -> dict[str, Any]:
    """One verdict explained."""
    step = Step.of(None, rollouts=rollouts, problems=problems)
    return stage.explain(step, recipe, rollout_id, verifier)


def trusting(folder: Path, **settings: object) -> Recipe:
    """A recipe that names the function in own.py, without which no table may name it."""
    values = {"verify": LIMITS | settings, "problems": {"verifier": f"{folder / 'own.py'}:judge"}}
    return parse_recipe(values, "test")


def rollout(problem_id: str, sample: int, text: str) -> dict[str, object]:
    return {
        "rollout_id": f"s00000/{problem_id}/{sample:02d}",
        "step": 0,
        "problem_id": problem_id,
        "sample": sample,
        "role": "fresh",
        "policy": "step-00000",
        "prompt_ids": [1],
        "token_ids": [2],
        "text": text,
        "logprobs": [-0.5],
        "entropies": None,
        "mean_entropy": 0.5,
        "entropy_source": "logprobs",
        "mean_logprob": -0.5,
        "tokens": 1,
        "token_hash": tables.token_hash([2]),
        "finish_reason": "stop",
        "seed": 1,
    }


def write_problems(path: Path, rows: list[tuple[str, str, str, str | None]]) -> Path:
    data = tables.frame(
        "problems",
        [
            {
                "problem_id": identifier,
                "prompt": [{"role": "user", "content": f"question {identifier}"}],
                "answer": answer,
                "verifier": verifier,
                "source": "test",
                "metadata": metadata,
            }
            for identifier, answer, verifier, metadata in rows
        ],
    )
    tables.write_table("problems", data, path)
    return path


def write_rollouts(path: Path, rows: list[dict[str, object]]) -> Path:
    tables.write_table("rollouts", tables.frame("rollouts", rows), path)
    return path


class Stream:
    """An engine that batches by itself, as vLLM does; it may be killed after some rows."""

    name = "stream"

    def __init__(self, inner: Engine, rows: int | None = None) -> None:
        self._inner = inner
        self._rows = rows
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.asked = list(requests)
        for number, completion in enumerate(self._inner.generate(requests, sampling)):
            if number == self._rows:
                raise KeyboardInterrupt
            yield completion

    def load(self, policy: str) -> None:
        self._inner.load(policy)

    def sleep(self) -> bool:
        return False

    def close(self) -> None:
        self._inner.close()
