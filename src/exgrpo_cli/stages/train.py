"""The train stage: one step of the mixed-policy objective, from files to the next policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.tables import row_seed
from exgrpo_cli.training.batch import Paths, read_groups, with_reference
from exgrpo_cli.training.metrics import batch_facts, step_metrics, warnings_of
from exgrpo_cli.training.policy import dtype_to_save, open_policy, save_policy

if TYPE_CHECKING:
    import torch

    from exgrpo_cli.training.update import Group, Terms


def train(
    *,
    rollouts: Paths,
    verdicts: Paths,
    scores: Paths | None,
    curated: Paths | None,
    policy: str,
    trainer: Path | None,
    out_policy: Path,
    out_trainer: Path,
    step: int,
    recipe: Recipe,
    replay_started: bool,
    force: bool = False,
    log: Log | None = None,
) -> dict[str, Any]:
    """Update the policy of step t on the mixed batch of step t.

    The batch: a fresh question's rollouts are a group; a replay question's rollouts and its
    curated trajectory (first, with the reward that it was collected with) are a group whose
    advantages come from all its rewards together. A replay question without a curated trajectory is
    a fresh group.

    With ``objective.truncated = "zero_advantage"`` (as DAPO's overlong filtering, arXiv 2503.14476,
    section 3.4) a fresh response that was cut off at the length limit still counts in its group's
    mean and deviation, and as a row and its tokens where losses are averaged, but its own advantage
    is 0: it has no policy gradient. Entropy bonus and KL, where set, still see its tokens.

    The result follows from the files and the recipe alone: on a CPU a step that was killed and is
    run again gives the same bits. ``out_trainer`` is written first, then ``out_policy``, each
    whole; where ``out_policy`` exists the step is done and nothing is run. Rows of an update that
    was left out are written to ``skipped.jsonl`` in ``out_trainer``.

    Under ``torchrun`` this is called in every process; they share the model (FSDP2) and the batch,
    and the first one writes.

    Args:
        rollouts: the step's ``rollouts``, from the policy being trained.
        verdicts: their ``verdicts``; one for each rollout, and no others.
        scores: their ``scores`` under that policy, for the old log-probabilities (``replay-*``
            parts are not read); None: computed here where they are needed.
        curated: the step's ``curated`` trajectories; None for none.
        policy: a Hugging Face folder, an adapter folder, or a hub name.
        trainer: the trainer state that belongs to ``policy``; None starts a fresh optimizer.
        out_policy: the next policy's folder.
        out_trainer: the trainer state that belongs to it.
        step: t.
        recipe: ``objective``, ``train``, ``lora``, ``model``, ``seed`` and ``rollout``'s
            temperature.
        replay_started: whether replay is on in this step; decides ``objective.clip = "auto"``.
        force: train anew where ``out_policy`` exists.
        log: gets plain lines.

    Returns:
        Metrics by name; None where there is no finite value.

        - ``train/loss``: mean over the updates of what was minimised.
        - ``train/on_policy_loss``, ``train/off_policy_loss``, ``train/ratio_mean``,
          ``train/ratio_max``, ``train/clip_fraction``, ``train/shaped_ratio_mean``,
          ``train/kl_old``, ``train/kl_replayed``: see
          :func:`exgrpo_cli.training.objective.summarise`.
        - ``train/entropy``: token mean, nats. ``train/kl_reference``: token mean of the k3 KL,
          when ``objective.kl`` is set.
        - ``train/sampling_logp_difference_mean``, ``..._max``: |engine's minus trainer's
          log-probability| of fresh tokens; ``train/sampling_ratio_mean``, ``..._std``, ``..._max``:
          of the ratio trainer / engine; ``train/sampling_capped_share``: where
          ``objective.sampler_cap`` cut it.
        - ``train/grad_norm``: mean over updates, before clipping. ``train/updates``,
          ``train/skipped_updates``, ``train/learning_rate``.
        - ``train/reward_fresh``, ``train/reward_replay``: mean reward of the rollouts of fresh, of
          replay questions; ``train/reward_replay_hard`` and so on: by the question's bucket.
        - ``train/replay_age_mean``, ``..._max``: steps since the replayed trajectories were
          collected. ``train/truncated_share``: of the rollouts.
        - ``train/entropy_of_start``: entropy as a share of that of the run's first step.
        - ``train/warning_entropy``, ``train/warning_ratio``, ``train/warning_groups``: 1 where it
          looks bad, see :func:`warnings_of`.
        - ``train/rows``, ``train/replayed_rows``, ``train/groups``,
          ``train/zero_advantage_groups``, ``train/tokens`` (response tokens of all rows).
        - ``train/seconds`` (the whole stage), ``train/tokens_per_second`` (of the updates),
          ``train/peak_memory_mb`` (of the GPU, or of the process).

        Token means are over the rows that were run: those without advantage are left out when
        neither entropy bonus nor KL needs them. When the step was done before, ``skipped`` is True
        and its metrics stand beside it, as far as ``out_trainer`` still has them.

    Raises:
        InputError: bad files, files of different steps or policies, a missing trainer state, or
            settings that cannot train.
    """
    from exgrpo_cli.training import distributed

    started = time.monotonic()
    with distributed.process_group(recipe.train.device) as device_name:
        say = (log or quiet) if distributed.rank() == 0 else quiet
        if distributed.gather(out_policy.exists())[0] and not force:
            say(f"{out_policy} exists already and is left as it is")
            from exgrpo_cli.training.trainer_state import read_trainer

            kept = read_trainer(out_trainer)["metrics"] if out_trainer.is_dir() else {}
            return {"skipped": True, "policy": str(out_policy)} | kept
        _check_settings(recipe)
        _check_trainer(trainer, step)

        from exgrpo_cli.models import check_policy, resolve_device

        check_policy(policy)
        device = resolve_device(device_name)
        groups = read_groups(rollouts, verdicts, scores, curated, step, recipe)
        facts = batch_facts(rollouts, verdicts, curated)
        terms = _terms(recipe, replay_started)
        with _seeded(row_seed(recipe.seed, "train", step), device):
            metrics = _train(
                groups,
                facts,
                terms,
                policy,
                trainer,
                out_policy,
                out_trainer,
                step,
                recipe,
                device,
                say,
                started,
            )
    return metrics


def _train(
    groups: list[Group],
    facts: dict[str, float | None],
    terms: Terms,
    policy: str,
    trainer: Path | None,
    out_policy: Path,
    out_trainer: Path,
    step: int,
    recipe: Recipe,
    device: torch.device,
    log: Log,
    started: float,
) -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    from exgrpo_cli.training import distributed
    from exgrpo_cli.training import trainer_state as checkpoint
    from exgrpo_cli.training.head import open_head
    from exgrpo_cli.training.logprobs import check_rows
    from exgrpo_cli.training.update import make_optimizer, run_updates

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if recipe.objective.kl > 0:
        groups = with_reference(groups, terms, recipe, device, log)
    ranks = distributed.ranks()
    where = f"{ranks} processes, {device.type}" if ranks > 1 else str(device)
    log(f"train step {step}: opening {policy} on {where}")
    model = open_policy(policy, recipe, device, torch.device("cpu") if ranks > 1 else device)
    head = open_head(model, distributed.shard(model, device))
    rows = [row for group in groups for row in group]
    check_rows(
        [row.prompt_ids for row in rows],
        [row.token_ids for row in rows],
        head.vocabulary,
        [f"rollout {row.rollout_id}" for row in rows],
    )
    optimizer = make_optimizer(model, recipe.train)
    done = 0
    notes: dict[str, Any] = {}
    if trainer is not None and trainer.exists():
        done = checkpoint.load_trainer(trainer, model, optimizer, step=step)
        notes = checkpoint.read_trainer(trainer).get("notes", {})
    log(
        f"train step {step}: {len(rows)} rows ({sum(row.replayed for row in rows)} replayed) in"
        f" {len(groups)} groups, clipping {'off' if terms.clip is None else 'on'}"
    )
    at = time.monotonic()
    result = run_updates(
        head,
        groups,
        terms,
        optimizer,
        recipe.train,
        seed=row_seed(recipe.seed, "train", step),
        done=done,
        progress=(
            min(step / recipe.loop.steps, 1.0),
            min((step + 1) / recipe.loop.steps, 1.0),
        ),
        log=lambda line: log(f"train step {step}: {line}"),
    )
    seconds = time.monotonic() - at
    metrics = step_metrics(result, groups, seconds, device) | facts
    entropy = metrics["train/entropy"]
    if entropy is not None:
        notes = {"first_entropy": entropy} | notes
    metrics |= warnings_of(metrics, notes.get("first_entropy"), log)
    metrics["train/seconds"] = time.monotonic() - started
    dtype = dtype_to_save(policy, recipe)
    checkpoint.save_trainer(
        out_trainer,
        model,
        optimizer,
        step=step + 1,
        updates=result.total_updates,
        masters=dtype != torch.float32,
        metrics=metrics,
        notes=notes,
        skipped=[
            {"update": one.update, "reason": one.reason, "norm": tables.finite_or_none(one.norm)}
            | {name: tables.finite_or_none(value) for name, value in asdict(row).items()}
            for one in result.skipped
            for row in one.rows
        ],
    )
    if result.skipped:
        log(f"train step {step}: the rows of skipped updates are in {out_trainer}/skipped.jsonl")
    save_policy(model, policy, out_policy, dtype, recipe.model)
    if recipe.train.keep is not None and distributed.rank() == 0:
        checkpoint.prune_trainers(out_trainer, recipe.train.keep)
    return metrics


def _check_settings(recipe: Recipe) -> None:
    if recipe.rollout.temperature <= 0:
        raise InputError(
            "rollout.temperature is 0; training needs sampled rollouts: set it above 0"
        )
    if recipe.rollout.top_p != 1.0:
        raise InputError(
            f"rollout.top_p is {recipe.rollout.top_p}; it must be 1 in training: cutting the"
            " distribution biases the ratios"
        )


def _check_trainer(trainer: Path | None, step: int) -> None:
    if trainer is not None and step > 0 and not trainer.is_dir():
        raise InputError(
            f"{trainer}: no trainer state for step {step}; train step {step - 1} first, or give"
            " no trainer state to start the optimizer afresh"
        )


def _terms(recipe: Recipe, replay_started: bool) -> Terms:
    from exgrpo_cli.training.objective import Clip
    from exgrpo_cli.training.update import Terms

    settings = recipe.objective
    on = not replay_started if settings.clip == "auto" else settings.clip == "on"
    return Terms(
        settings=settings,
        clip=Clip(settings.clip_low, settings.clip_high) if on else None,
        length_divisor=recipe.length_divisor,
        temperature=recipe.rollout.temperature,
    )


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's random numbers from a seed inside the block, and as they were after it."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
