"""The train stage: one step of the mixed-policy objective, from files to the next policy."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.tables import row_seed

if TYPE_CHECKING:
    import polars as pl
    import torch
    from transformers import PreTrainedModel

    from exgrpo_cli.policy.update import Group, Row, StepResult, Terms

Paths = Path | Sequence[Path]
"""A file, a folder of parts, or several of either."""


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
          :func:`exgrpo_cli.policy.objective.summarise`.
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
    from exgrpo_cli.policy import distributed

    started = time.monotonic()
    with distributed.process_group(recipe.train.device) as device_name:
        say = (log or quiet) if distributed.rank() == 0 else quiet
        if distributed.gather(out_policy.exists())[0] and not force:
            say(f"{out_policy} exists already and is left as it is")
            from exgrpo_cli.policy.checkpoint import read_trainer

            kept = read_trainer(out_trainer)["metrics"] if out_trainer.is_dir() else {}
            return {"skipped": True, "policy": str(out_policy)} | kept
        _check_settings(recipe)
        _check_trainer(trainer, step)

        from exgrpo_cli.models import check_policy, resolve_device

        check_policy(policy)
        device = resolve_device(device_name)
        groups = _read_groups(rollouts, verdicts, scores, curated, step, recipe)
        facts = _facts(rollouts, verdicts, curated)
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

    from exgrpo_cli.policy import checkpoint, distributed
    from exgrpo_cli.policy.logprobs import check_rows, open_head
    from exgrpo_cli.policy.update import make_optimizer, run_updates

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if recipe.objective.kl > 0:
        groups = _with_reference(groups, terms, recipe, device, log)
    ranks = distributed.ranks()
    where = f"{ranks} processes, {device.type}" if ranks > 1 else str(device)
    log(f"train step {step}: opening {policy} on {where}")
    model = _open_policy(policy, recipe, device, torch.device("cpu") if ranks > 1 else device)
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
    metrics = _metrics(result, groups, seconds, device) | facts
    entropy = metrics["train/entropy"]
    if entropy is not None:
        notes = {"first_entropy": entropy} | notes
    metrics |= warnings_of(metrics, notes.get("first_entropy"), log)
    metrics["train/seconds"] = time.monotonic() - started
    dtype = _save_dtype(policy, recipe)
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
    checkpoint.save_policy(model, policy, out_policy, dtype, recipe.model)
    if recipe.train.keep is not None and distributed.rank() == 0:
        checkpoint.prune_trainers(out_trainer, recipe.train.keep)
    return metrics


# --- settings -------------------------------------------------------------------------------


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
    from exgrpo_cli.policy.objective import Clip
    from exgrpo_cli.policy.update import Terms

    settings = recipe.objective
    on = not replay_started if settings.clip == "auto" else settings.clip == "on"
    return Terms(
        settings=settings,
        clip=Clip(settings.clip_low, settings.clip_high) if on else None,
        length_divisor=recipe.length_divisor,
        temperature=recipe.rollout.temperature,
    )


def _save_dtype(policy: str, recipe: Recipe) -> torch.dtype:
    import torch

    from exgrpo_cli.models import dtype_named
    from exgrpo_cli.policy.checkpoint import saved_dtype

    name = recipe.train.save_dtype
    if name != "auto":
        return dtype_named(name)
    if recipe.lora.enabled:
        return torch.float32
    return saved_dtype(policy, recipe.model.trust_remote_code)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's random numbers from a seed inside the block, and as they were after it."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# --- models ---------------------------------------------------------------------------------


def _open_policy(
    policy: str, recipe: Recipe, device: torch.device, at_first: torch.device
) -> PreTrainedModel:
    """The policy with its trained parameters in float32 and everything else frozen.

    Args:
        policy: a folder or hub name.
        recipe: ``lora``, ``train`` and ``model``.
        device: where it will be trained.
        at_first: where it is put now.
    """
    from exgrpo_cli.models import is_adapter, load_model, training_dtype

    lora = recipe.lora
    if is_adapter(policy) and not lora.enabled:
        raise InputError(
            f"{policy}: this policy is an adapter and lora.enabled is false; set it to true to"
            " train the adapter on, or merge it into its base model first"
        )
    model: Any = load_model(policy, recipe.model, at_first, training_dtype(recipe, device))
    if is_adapter(policy):
        model.set_adapter(model.active_adapter)
        if device.type == "cuda" and recipe.train.autocast:
            for parameter in model.parameters():  # whole modules that the adapter replaces
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    elif lora.enabled:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.targets[0] if lora.targets == ["all-linear"] else lora.targets,
        )
        try:
            model = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"lora.targets = {lora.targets}: {error}") from error
    recompute = recipe.train.gradient_checkpointing
    if recompute is True or (recompute == "auto" and device.type == "cuda"):
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _with_reference(
    groups: list[Group], terms: Terms, recipe: Recipe, device: torch.device, log: Log
) -> list[Group]:
    """Every row with its log-probabilities under the reference policy."""
    from exgrpo_cli.models import load_model, resolve_dtype
    from exgrpo_cli.policy.logprobs import score_sequences
    from exgrpo_cli.policy.update import autocast

    path = recipe.objective.reference or recipe.model.path
    if not path:
        raise InputError("objective.kl needs a reference: set objective.reference or model.path")
    log(f"scoring the batch under the reference policy {path}")
    model = load_model(path, recipe.model, device, resolve_dtype(recipe.model.dtype, device))
    rows = [row for group in groups for row in group]
    with autocast(device, recipe.train.autocast):
        scored = score_sequences(
            model,
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            terms.temperature,
            recipe.train.tokens_per_microbatch,
        )
    found = iter(scored)
    return [[replace(row, reference=next(found)[0]) for row in group] for group in groups]


# --- the batch ------------------------------------------------------------------------------


def _named(paths: Paths) -> str:
    return str(paths) if isinstance(paths, Path) else ", ".join(str(path) for path in paths)


def _read_groups(
    rollouts: Paths,
    verdicts: Paths,
    scores: Paths | None,
    curated: Paths | None,
    step: int,
    recipe: Recipe,
) -> list[Group]:
    """The mixed batch: groups in an order that does not depend on parts, advantages set."""
    import torch

    from exgrpo_cli.policy.objective import group_advantages
    from exgrpo_cli.policy.update import Row

    silent = recipe.objective.truncated == "zero_advantage"
    fresh = _read_rollouts(rollouts, step, ["finish_reason"] if silent else [])
    cut = fresh.filter(fresh["finish_reason"] == "length")["rollout_id"].to_list() if silent else []
    truncated = set(cut)
    rewards = _read_rewards(verdicts, fresh["rollout_id"].to_list(), rollouts)
    old = {} if scores is None else _read_scores(scores, fresh, step, rollouts)
    past = [] if curated is None else _read_curated(curated, step)

    members: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row in fresh.sort("problem_id", "role", "sample").iter_rows(named=True):
        logprobs = old.get(row["rollout_id"])
        member = Row(
            rollout_id=row["rollout_id"],
            prompt_ids=row["prompt_ids"],
            token_ids=row["token_ids"],
            advantage=0.0,
            replayed=False,
            old=None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32),
            sampler=torch.tensor(row["logprobs"], dtype=torch.float32),
        )
        group = members.setdefault((row["problem_id"], row["role"]), [])
        group.append((member, rewards[row["rollout_id"]]))
    for row in past:
        key = (row["problem_id"], "replay")
        if key not in members and recipe.rollout.samples > 1:
            assert curated is not None
            raise InputError(
                f"{_named(curated)}: question {row['problem_id']} has a curated trajectory but no"
                f" replay rollouts in {_named(rollouts)}; they are of different plans"
            )
        member = Row(
            rollout_id=row["rollout_id"],
            prompt_ids=row["prompt_ids"],
            token_ids=row["token_ids"],
            advantage=0.0,
            replayed=True,
            old=torch.tensor(row["logprobs"], dtype=torch.float32),
        )
        members.setdefault(key, []).insert(0, (member, row["reward"]))

    ordered = [members[key] for key in sorted(members)]
    values = torch.tensor([r for group in ordered for _, r in group], dtype=torch.float64)
    index = torch.tensor([i for i, group in enumerate(ordered) for _ in group])
    advantages = iter(group_advantages(values, index, recipe.objective.divide_by_std).tolist())
    groups = [[replace(row, advantage=next(advantages)) for row, _ in group] for group in ordered]
    return [
        [
            replace(row, advantage=0.0) if row.rollout_id in truncated and not row.replayed else row
            for row in group
        ]
        for group in groups
    ]


def _read_rollouts(paths: Paths, step: int, also: Sequence[str] = ()) -> pl.DataFrame:
    columns = [
        "rollout_id", "step", "problem_id", "sample", "role", "policy", "prompt_ids", "token_ids",
        "logprobs", *also,
    ]  # fmt: skip
    data = tables.read_table("rollouts", paths, columns)
    name = _named(paths)
    if data.is_empty():
        raise InputError(f"{name}: no rollouts; there is nothing to train on")
    _refuse_repeats(data, ["rollout_id"], name)
    _refuse_other_steps(data, step, name)
    policies = data["policy"].unique().sort().to_list()
    if len(policies) > 1:
        raise InputError(
            f"{name}: rollouts of the policies {policies[0]} and {policies[1]} lie together"
        )
    return data


def _read_rewards(paths: Paths, ids: list[str], rollouts: Paths) -> dict[str, float]:
    data = tables.read_table("verdicts", paths, ["rollout_id", "reward"])
    name = _named(paths)
    _refuse_repeats(data, ["rollout_id"], name)
    rewards = dict(zip(data["rollout_id"].to_list(), data["reward"].to_list(), strict=True))
    known = set(ids)
    for rollout_id in ids:
        if rollout_id not in rewards:
            raise InputError(
                f"{name}: no verdict on rollout {rollout_id} of {_named(rollouts)}; run verify"
            )
    for rollout_id, reward in rewards.items():
        if rollout_id not in known:
            raise InputError(
                f"{name}: a verdict on rollout {rollout_id}, which is not in {_named(rollouts)};"
                " they are of different steps or runs"
            )
        if not math.isfinite(reward):
            raise InputError(f"{name}: the reward of rollout {rollout_id} is {reward}")
    return rewards


def _read_scores(
    paths: Paths, rollouts: pl.DataFrame, step: int, rollouts_path: Paths
) -> dict[str, list[float]]:
    """Log-probabilities of the rollouts under the policy that sampled them, by rollout."""
    roots = [paths] if isinstance(paths, Path) else list(paths)
    files = [file for root in roots for file in tables.parquet_files(root)]
    files = [file for file in files if not file.name.startswith("replay-")]
    data = tables.read_table("scores", files, ["rollout_id", "policy", "step", "logprobs"])
    name = _named(paths)
    data = data.filter(data["rollout_id"].is_in(rollouts["rollout_id"].to_list()))
    _refuse_repeats(data, ["rollout_id", "policy"], name)
    own = data.filter(data["policy"] == rollouts["policy"][0])
    found = dict(zip(own["rollout_id"].to_list(), own["logprobs"].to_list(), strict=True))
    for rollout_id, token_ids in rollouts.select("rollout_id", "token_ids").iter_rows():
        if rollout_id not in found:
            raise InputError(
                f"{name}: no score of rollout {rollout_id} under its policy"
                f" {rollouts['policy'][0]}; run score for step {step}, or train without scores"
            )
        if len(found[rollout_id]) != len(token_ids):
            raise InputError(
                f"{name}: rollout {rollout_id} has {len(found[rollout_id])} logprobs, but"
                f" {len(token_ids)} tokens in {_named(rollouts_path)}; run score again"
            )
    return found


def _read_curated(paths: Paths, step: int) -> list[dict[str, Any]]:
    columns = ["step", "problem_id", "rollout_id", "prompt_ids", "token_ids", "logprobs", "reward"]
    data = tables.read_table("curated", paths, columns)
    _refuse_other_steps(data, step, _named(paths))
    _refuse_repeats(data, ["problem_id"], _named(paths))
    return data.sort("problem_id").to_dicts()


def _refuse_repeats(data: pl.DataFrame, columns: list[str], name: str) -> None:
    repeated = data.filter(data.select(columns).is_duplicated())
    if not repeated.is_empty():
        raise InputError(
            f"{name}: {columns[0]} {repeated[columns[0]][0]} is there more than once; are parts of"
            " two divisions lying together?"
        )


def _refuse_other_steps(data: pl.DataFrame, step: int, name: str) -> None:
    other = data.filter(data["step"] != step)
    if not other.is_empty():
        raise InputError(
            f"{name}: rollout {other['rollout_id'][0]} is of step {other['step'][0]}, not of step"
            f" {step}"
        )


# --- metrics --------------------------------------------------------------------------------

ENTROPY_FLOOR = 0.2
"""Below this share of the first step's entropy, a policy hardly explores any more."""
RATIO_CEILING = 10.0
"""No sound update moves a fresh token's probability by this factor within one step."""
SILENT_SHARE = 0.9
"""With so many groups of equal rewards, a step learns from almost nothing."""


def warnings_of(
    metrics: dict[str, Any], first_entropy: float | None, log: Log
) -> dict[str, float | None]:
    """Early signs of a run that goes wrong, as metrics, and each in a line.

    Args:
        metrics: of the step, ``train/...``.
        first_entropy: of the run's first step; None where it is not known.
        log: gets a line for each warning.

    Returns:
        ``train/entropy_of_start`` and the three ``train/warning_...``, 0 or 1.
    """
    entropy, ratio = metrics["train/entropy"], metrics["train/ratio_max"]
    share = entropy / first_entropy if entropy is not None and first_entropy else None
    silent = metrics["train/zero_advantage_groups"] / max(metrics["train/groups"], 1)
    collapse = (
        f"entropy is {share or 0:.0%} of the first step's: the policy is collapsing; raise"
        " objective.entropy_bonus or lower train.learning_rate"
    )
    jump = (
        f"a fresh token's probability rose {ratio or 0:.3g} times in this step; lower"
        " train.learning_rate, or set objective.clip = on"
    )
    silence = (
        f"{silent:.0%} of the groups have equal rewards and teach nothing; are the problems too"
        " hard or too easy, or is the verifier wrong?"
    )
    found = {
        "entropy": (share is not None and share < ENTROPY_FLOOR, collapse),
        "ratio": (ratio is not None and ratio > RATIO_CEILING, jump),
        "groups": (silent > SILENT_SHARE, silence),
    }
    for is_bad, words in found.values():
        if is_bad:
            log(f"warning: {words}")
    flags = {f"train/warning_{name}": float(is_bad) for name, (is_bad, _) in found.items()}
    return {"train/entropy_of_start": share, **flags}


def _facts(rollouts: Paths, verdicts: Paths, curated: Paths | None) -> dict[str, float | None]:
    """Metrics of the batch itself: rewards by role and bucket, replay age, truncation."""
    import polars as pl

    fresh = tables.read_table(
        "rollouts", rollouts, ["rollout_id", "problem_id", "role", "finish_reason"]
    )
    rewards = tables.read_table("verdicts", verdicts, ["rollout_id", "reward"])
    fresh = fresh.join(rewards, on="rollout_id")
    facts: dict[str, Any] = {
        "truncated_share": (fresh["finish_reason"] == "length").mean(),
        "reward_fresh": fresh.filter(pl.col("role") == "fresh")["reward"].mean(),
        "reward_replay": fresh.filter(pl.col("role") == "replay")["reward"].mean(),
    }
    if curated is not None:
        columns = ["problem_id", "bucket", "step", "collected_step"]
        past = tables.read_table("curated", curated, columns)
        ages = past["step"] - past["collected_step"]
        facts |= {"replay_age_mean": ages.mean(), "replay_age_max": ages.max()}
        again = fresh.filter(pl.col("role") == "replay").join(past, on="problem_id")
        for bucket, rows in again.group_by("bucket"):
            facts[f"reward_replay_{bucket[0]}"] = rows["reward"].mean()
    return {f"train/{name}": None if v is None else float(v) for name, v in facts.items()}


def _metrics(
    result: StepResult, groups: list[Group], seconds: float, device: torch.device
) -> dict[str, Any]:
    from exgrpo_cli.policy.objective import summarise

    rows = [row for group in groups for row in group]
    tokens = sum(len(row.token_ids) for row in rows)
    sums = result.sums

    def mean(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if sums.get(count) and name in sums else None

    values: dict[str, float | None] = {
        "loss": _finite_mean(result.losses),
        **summarise(sums),
        "entropy": mean("entropy", "tokens"),
        "sampling_logp_difference_mean": mean("sampler_difference", "sampler_tokens"),
        "sampling_logp_difference_max": sums.get("sampler_difference_max"),
        "sampling_ratio_mean": mean("sampler_ratio", "sampler_tokens"),
        "sampling_ratio_std": _deviation(sums),
        "sampling_ratio_max": sums.get("sampler_ratio_max"),
        "grad_norm": _finite_mean(result.norms),
        "updates": result.updates,
        "skipped_updates": len(result.skipped),
        "learning_rate": result.learning_rate,
        "rows": len(rows),
        "replayed_rows": sum(row.replayed for row in rows),
        "groups": len(groups),
        "zero_advantage_groups": sum(not any(r.advantage for r in group) for group in groups),
        "tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "peak_memory_mb": _peak_memory(device),
    }
    if "kl_reference" in sums:
        values["kl_reference"] = mean("kl_reference", "tokens")
    if "sampler_capped" in sums:
        values["sampling_capped_share"] = mean("sampler_capped", "sampler_tokens")
    return {f"train/{name}": tables.finite_or_none(value) for name, value in values.items()}


def _deviation(sums: Mapping[str, float]) -> float | None:
    """Standard deviation of the ratio between trainer and engine."""
    count = sums.get("sampler_tokens", 0.0)
    if not count:
        return None
    mean = sums["sampler_ratio"] / count
    variance = sums["sampler_ratio_square"] / count - mean * mean
    return math.sqrt(variance) if variance > 0 else 0.0 if math.isfinite(variance) else math.nan


def _finite_mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _peak_memory(device: torch.device) -> float:
    """MiB: the most that torch held on a GPU in this step, or that a process ever took."""
    import resource

    import torch

    from exgrpo_cli.policy import distributed

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak /= 2**20 if sys.platform == "darwin" else 2**10
    return max(distributed.gather(peak))
