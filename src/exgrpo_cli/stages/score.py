"""The score stage: exact log-probabilities and entropies under the policy that samples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import step_number
from exgrpo_cli.step import Result, Step
from exgrpo_cli.tables import WHOLE, Shard

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from exgrpo_cli.training.head import Head

CANDIDATES_PER_PART = 512
"""Replay candidates in one part of the scores."""


def score(
    step: Step, recipe: Recipe, *, shard: Shard = WHOLE, force: bool = False, log: Log = quiet
) -> Result:
    """Score a step's rollouts, what it takes in from others, and its replay questions' candidates.

    A forward pass of the training model over prompt and response gives the log-probability of
    every response token and the entropy of its distribution, logits divided by the sampling
    temperature. Those of the fresh rollouts are the old log-probabilities of the objective; those
    of the stored trajectories let ``curate`` choose by entropy under the same policy.

    Args:
        step: reads ``rollouts`` and the policy that sampled them, in a run also ``plan`` and the
            experience; writes ``scores``: a part beside each part of the rollouts and imports,
            and ``replay-*`` for the stored trajectories.
        recipe: ``score``, ``rollout.temperature``, ``loop.lag`` and ``model``.
        shard: which parts to do.
        force: score parts again that exist.
        log: gets plain lines.

    Returns:
        Parts done and skipped; metrics ``rows``, ``candidates``, ``tokens`` and ``seconds``. What
        was computed is the forward passes.

    Raises:
        InputError: missing or damaged rollouts, a policy that cannot be opened, or rollouts of
            another policy of the run.
    """
    started = time.monotonic()
    step = step.lagged(recipe.loop.lag)
    out, rollouts = step.scores, step.rollouts
    if out.resolve() == rollouts.resolve():
        raise InputError(f"{out}: holds the rollouts; give the scores a folder of their own")
    jobs: list[tuple[Path, Path | pl.DataFrame]] = [
        (out / file.name, file)
        for file in tables.parquet_files(rollouts)
        if shard.has(tables.part_number(file)[0])
    ]
    jobs += [job for number, job in enumerate(_candidate_parts(step)) if shard.has(number)]
    imports = enumerate(step.imports("scores"))
    jobs += [(target, file) for number, (file, target) in imports if shard.has(number)]
    todo = [job for job in jobs if force or not job[0].exists()]
    metrics = {"rows": 0, "candidates": 0, "tokens": 0}
    computing = 0.0
    if todo:
        head = _open(step.policy(recipe.model.path), recipe, log)
        with progress(f"score step {step.number}", len(todo), log) as advance:
            for target, source in todo:
                if isinstance(source, Path):
                    rows, kind = _rollouts(step, source), "rows"
                else:
                    rows, kind = _trajectories(step, source), "candidates"
                began = time.monotonic()
                scored = _score_rows(head, rows, recipe)
                computing += time.monotonic() - began
                tables.write_table("scores", _table(rows["rollout_id"], scored, step), target)
                metrics[kind] += rows.height
                tokens = int(rows["token_ids"].list.len().sum())
                metrics["tokens"] += tokens
                advance(1, tokens)
    return Result(
        len(todo),
        len(jobs) - len(todo),
        metrics=metrics | {"seconds": round(time.monotonic() - started, 3)},
        compute_seconds=round(computing, 3),
    )


def _open(policy: str, recipe: Recipe, log: Log) -> Head:
    from exgrpo_cli.models import load_model, resolve_device, training_dtype
    from exgrpo_cli.training.head import open_head

    device = resolve_device(recipe.score.device)
    log(f"score: opening {policy} on {device}")
    return open_head(load_model(policy, recipe.model, device, training_dtype(recipe, device)))


def _candidate_parts(step: Step) -> list[tuple[Path, pl.DataFrame]]:
    """The stored trajectories of the step's replay questions, cut into parts."""
    run = step.run
    if run is None or not run.plan(step.number).exists() or not run.experience.exists():
        return []
    from exgrpo_cli.experience.choose import replay_candidates

    candidates = replay_candidates(run, step.number)
    if candidates.is_empty():
        return []
    chunks = tables.chunked(candidates.height, CANDIDATES_PER_PART)
    return [
        (
            step.scores / tables.part_name(i, len(chunks), prefix="replay"),
            candidates.slice(chunk.start, len(chunk)),
        )
        for i, chunk in enumerate(chunks)
    ]


def _rollouts(step: Step, source: Path) -> pl.DataFrame:
    """A part of the step's rollouts, refused where another policy of the run has sampled it."""
    columns = ["rollout_id", "step", "policy", "prompt_ids", "token_ids"]
    own = None if "rollouts" in step.given else step.number
    rows = tables.read_table("rollouts", source, columns, step=own)
    for policy in rows["policy"].unique():
        if step.model is None and policy != step.policy_name and step_number(policy) is not None:
            raise InputError(
                f"{source}: sampled by policy {policy}, and loop.lag = {step.lag} means"
                f" {step.policy_name}; score with the lag that step {step.number} was sampled with,"
                " or give --policy"
            )
    return rows


def _trajectories(step: Step, candidates: pl.DataFrame) -> pl.DataFrame:
    from exgrpo_cli.experience.choose import fetch_trajectories

    assert step.run is not None  # only a run has candidates
    return fetch_trajectories(step.run.root, candidates)


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


def _table(names: pl.Series, scored: list[tuple[Tensor, Tensor]], step: Step) -> pl.DataFrame:
    return tables.frame(
        "scores",
        (
            {
                "rollout_id": rollout_id,
                "policy": step.policy_name,
                "step": step.number,
                "logprobs": logprobs.tolist(),
                "entropies": entropies.tolist(),
                "mean_entropy": float(entropies.double().mean()),
                "mean_logprob": float(logprobs.double().mean()),
            }
            for rollout_id, (logprobs, entropies) in zip(names, scored, strict=True)
        ),
    )
