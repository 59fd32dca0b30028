"""The score stage: exact log-probabilities and entropies under the current policy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import WHOLE, Shard

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from exgrpo_cli.training.head import Head

CANDIDATES_PER_PART = 512
"""Replay candidates in one part of the scores."""


def score(
    *,
    rollouts: Path,
    out: Path,
    policy: str,
    policy_name: str,
    step: int,
    recipe: Recipe,
    run: RunDir | None = None,
    shard: Shard = WHOLE,
    force: bool = False,
    log: Log = quiet,
) -> dict[str, Any]:
    """Score a step's rollouts, and the stored trajectories of its replay questions.

    A forward pass of the training model over prompt and response gives the log-probability of
    every response token and the entropy of its distribution, logits divided by the sampling
    temperature. Those of the fresh rollouts are the old log-probabilities of the objective; those
    of the stored trajectories let ``curate`` choose by entropy under the current policy.

    Args:
        rollouts: a folder of parts (or one file) of the ``rollouts`` table.
        out: folder of the ``scores`` parts: ``part-*`` beside each part of ``rollouts``, and
            ``replay-*`` for the stored trajectories.
        policy: the policy that sampled the rollouts.
        policy_name: goes into the ``policy`` column.
        step: goes into the ``step`` column.
        recipe: ``score``, ``rollout.temperature`` and ``model``.
        run: where the step's plan and the experience lie; without it no candidates are scored.
        shard: which parts to do.
        force: score parts again that exist.
        log: gets plain lines.

    Returns:
        Counts: ``parts_done``, ``parts_skipped``, ``rows``, ``candidates``, ``tokens``,
        ``seconds``, and of them ``compute_seconds`` in forward passes.

    Raises:
        InputError: missing or damaged rollouts, or a policy that cannot be opened.
    """
    started = time.monotonic()
    if out.resolve() == rollouts.resolve():
        raise InputError(f"{out}: holds the rollouts; give the scores a folder of their own")
    result = {"parts_done": 0, "parts_skipped": 0, "rows": 0, "candidates": 0, "tokens": 0}
    computing = 0.0
    jobs: list[tuple[Path, Path | pl.DataFrame]] = []
    for file in tables.parquet_files(rollouts):
        if shard.has(tables.part_number(file)[0]):
            jobs.append((out / file.name, file))
    for number, (target, candidates) in enumerate(_candidate_parts(run, step, out)):
        if shard.has(number):
            jobs.append((target, candidates))
    todo = [job for job in jobs if force or not job[0].exists()]
    result["parts_skipped"] = len(jobs) - len(todo)
    if todo:
        head = _open(policy, recipe, log)
        with progress(f"score step {step}", len(todo), log) as advance:
            for target, source in todo:
                is_rollouts = isinstance(source, Path)
                rows = (
                    tables.read_table("rollouts", source, ["rollout_id", "prompt_ids", "token_ids"])
                    if isinstance(source, Path)
                    else _trajectories(run, source)
                )
                began = time.monotonic()
                scored = _score_rows(head, rows, recipe)
                computing += time.monotonic() - began
                table = _table(rows["rollout_id"], scored, policy_name, step)
                tables.write_table("scores", table, target)
                result["parts_done"] += 1
                result["rows" if is_rollouts else "candidates"] += rows.height
                result["tokens"] += int(rows["token_ids"].list.len().sum())
                advance(1)
    return result | {
        "compute_seconds": round(computing, 3),
        "seconds": round(time.monotonic() - started, 3),
    }


def _open(policy: str, recipe: Recipe, log: Log) -> Head:
    from exgrpo_cli.models import load_model, resolve_device, training_dtype
    from exgrpo_cli.training.head import open_head

    device = resolve_device(recipe.score.device)
    log(f"score: opening {policy} on {device}")
    return open_head(load_model(policy, recipe.model, device, training_dtype(recipe, device)))


def _candidate_parts(run: RunDir | None, step: int, out: Path) -> list[tuple[Path, pl.DataFrame]]:
    """The stored trajectories of the step's replay questions, cut into parts."""
    if run is None or not run.plan(step).exists() or not run.experience.exists():
        return []
    from exgrpo_cli.experience.choose import replay_candidates

    candidates = replay_candidates(run, step)
    if candidates.is_empty():
        return []
    chunks = tables.chunked(candidates.height, CANDIDATES_PER_PART)
    return [
        (
            out / tables.part_name(i, len(chunks), prefix="replay"),
            candidates.slice(chunk.start, len(chunk)),
        )
        for i, chunk in enumerate(chunks)
    ]


def _trajectories(run: RunDir | None, candidates: pl.DataFrame) -> pl.DataFrame:
    from exgrpo_cli.experience.choose import fetch_trajectories

    if run is None:
        raise InputError("stored trajectories lie in a run directory, and none was given")
    return fetch_trajectories(run.root, candidates)


def _score_rows(head: Head, rows: pl.DataFrame, recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    from exgrpo_cli.training.logprobs import score_sequences
    from exgrpo_cli.training.update import autocast

    device = next(head.model.parameters()).device
    with autocast(device, recipe.train.autocast):
        return score_sequences(
            head.model,
            rows["prompt_ids"].to_list(),
            rows["token_ids"].to_list(),
            temperature=recipe.rollout.temperature,
            tokens_per_batch=recipe.score.tokens_per_batch,
            head=head,
        )


def _table(
    names: pl.Series, scored: list[tuple[Tensor, Tensor]], policy_name: str, step: int
) -> pl.DataFrame:
    return tables.frame(
        "scores",
        (
            {
                "rollout_id": rollout_id,
                "policy": policy_name,
                "step": step,
                "logprobs": logprobs.tolist(),
                "entropies": entropies.tolist(),
                "mean_entropy": float(entropies.double().mean()),
                "mean_logprob": float(logprobs.double().mean()),
            }
            for rollout_id, (logprobs, entropies) in zip(names, scored, strict=True)
        ),
    )
