"""The gradient of one mini-batch, and one step's optimizer updates."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from exgrpo_cli.policy import objective
from exgrpo_cli.policy.checkpoint import trainable
from exgrpo_cli.policy.logprobs import Head, score_sequences, token_statistics
from exgrpo_cli.policy.objective import Clip, Sums
from exgrpo_cli.policy.packing import even_chunks, micro_batches
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import ObjectiveSettings, TrainSettings


@dataclass(frozen=True)
class Row:
    """One response of the mixed batch."""

    rollout_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    advantage: float
    replayed: bool
    old: Tensor | None
    """``[tokens]`` float32 on the CPU, nats: log-probabilities under the sampling policy, or those
    recorded with a replayed trajectory; None where the trainer has to compute them."""
    sampler: Tensor | None = None
    """``[tokens]``, as the rollout engine reported them; None for replayed rows."""
    reference: Tensor | None = None
    """``[tokens]`` under the reference policy of the KL term."""

    @property
    def length(self) -> int:
        """Tokens that the model is run on."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


Group = list[Row]
"""The rows of one question in one role; advantages were taken over them together."""


@dataclass(frozen=True)
class Terms:
    """The objective of a step, resolved."""

    settings: ObjectiveSettings
    clip: Clip | None
    length_divisor: int
    temperature: float

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows without advantage have a gradient too."""
        return self.settings.entropy_bonus > 0 or self.settings.kl > 0


@dataclass
class Gradient:
    """What a mini-batch's backward passes left besides the gradient itself."""

    sums: Sums = field(default_factory=dict)
    faulty: list[str] = field(default_factory=list)
    """Rollouts whose loss is not finite; if any, the gradient is incomplete."""


@dataclass
class StepResult:
    """One step's updates, for the metrics."""

    sums: Sums
    losses: list[float]
    norms: list[float]
    updates: int
    skipped: int
    learning_rate: float
    total_updates: int


def autocast(device: torch.device, enabled: bool) -> Any:
    """bfloat16 compute where it is asked for and the device has it; float32 otherwise."""
    if enabled and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def accumulate_gradient(
    head: Head, rows: Sequence[Row], terms: Terms, tokens_per_microbatch: int, use_autocast: bool
) -> Gradient:
    """Add a mini-batch's gradient to the parameters', micro-batch by micro-batch.

    The denominators are those of the whole mini-batch, so the gradient does not depend on how it
    is cut. Rows without advantage are left out where no other term needs them: their gradient is 0.

    Args:
        head: the policy.
        rows: of the mini-batch; those without tokens count as rows.
        terms: the objective.
        tokens_per_microbatch: padded tokens of one pass.
        use_autocast: see :func:`autocast`.
    """
    settings = terms.settings
    device = next(head.model.parameters()).device
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    weights = objective.row_weights(lengths, settings.aggregate, terms.length_divisor)
    tokens = int(lengths.sum())
    active = [
        index
        for index, row in enumerate(rows)
        if row.token_ids and (row.advantage != 0 or terms.needs_all_rows)
    ]
    result = Gradient()
    for batch in micro_batches([rows[i].length for i in active], tokens_per_microbatch):
        chosen = [rows[active[i]] for i in batch]
        sizes = torch.tensor([len(row.token_ids) for row in chosen])
        with autocast(device, use_autocast):
            logprobs, entropies = token_statistics(
                head,
                [row.prompt_ids for row in chosen],
                [row.token_ids for row in chosen],
                terms.temperature,
            )
        assert entropies is not None
        current = _by_row(logprobs.detach().cpu(), chosen)
        olds = [
            part if row.old is None else row.old for row, part in zip(chosen, current, strict=True)
        ]
        old = torch.cat(olds).to(logprobs)
        per_row = torch.tensor([row.advantage for row in chosen], dtype=torch.float64)
        replayed = torch.tensor([row.replayed for row in chosen]).repeat_interleave(sizes)
        losses, sums = objective.policy_loss(
            logprobs,
            old,
            per_row.repeat_interleave(sizes).to(logprobs),
            replayed.to(device),
            clip=terms.clip,
            shaping=settings.shaping,
            beta=settings.beta,
            power=settings.power,
            cap=settings.replay_ratio_cap,
        )
        if settings.kl > 0:
            reference = torch.cat([_present(row.reference) for row in chosen]).to(logprobs)
            kl = objective.k3_kl(logprobs, reference)
            losses = losses + settings.kl * kl
            sums["kl_reference"] = float(kl.detach().sum())
        weight = weights[[active[i] for i in batch]].repeat_interleave(sizes).to(logprobs)
        weighted = weight * losses
        loss = weighted.sum()
        if settings.entropy_bonus > 0:
            loss = loss + objective.entropy_bonus(entropies, settings.entropy_bonus, tokens)
        value = float(loss.detach())
        sums |= {"loss": value, "tokens": float(logprobs.numel())}
        sums["entropy"] = float(entropies.detach().sum())
        sums |= _sampler_difference(chosen, olds)
        result.sums = objective.merge_sums(result.sums, sums)
        if not math.isfinite(value):
            parts = _by_row((weighted.detach() + entropies.detach()).cpu(), chosen)
            result.faulty.extend(
                row.rollout_id
                for row, part in zip(chosen, parts, strict=True)
                if not bool(part.isfinite().all())
            )
            if not result.faulty:  # finite rows whose sum is not
                result.faulty.extend(row.rollout_id for row in chosen)
            continue
        loss.backward()  # type: ignore[no-untyped-call]
    return result


def _by_row(flat: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """Flat tokens, cut into each row's."""
    ends = list(itertools.accumulate(len(row.token_ids) for row in rows))
    return [flat[a:b] for a, b in itertools.pairwise([0, *ends])]


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _sampler_difference(rows: Sequence[Row], old: Sequence[Tensor]) -> Sums:
    """How far the engine's log-probabilities are from the trainer's, over fresh tokens."""
    pairs = [(row.sampler, part) for row, part in zip(rows, old, strict=True)]
    differences = [(part - sampler).abs() for sampler, part in pairs if sampler is not None]
    if not differences:
        return {}
    flat = torch.cat(differences)
    return {
        "sampler_tokens": float(flat.numel()),
        "sampler_difference": float(flat.sum()),
        "sampler_difference_max": float(flat.max()),
    }


def fill_old(
    head: Head, groups: Sequence[Group], terms: Terms, tokens_per_batch: int, use_autocast: bool
) -> list[Group]:
    """Give the rows that have no old log-probabilities those of the policy as it is now."""
    rows = [row for group in groups for row in group if row.old is None]
    device = next(head.model.parameters()).device
    with autocast(device, use_autocast):
        scored = score_sequences(
            head.model,
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            terms.temperature,
            tokens_per_batch,
            head=head,
        )
    found = iter(scored)
    return [
        [replace(row, old=next(found)[0]) if row.old is None else row for row in group]
        for group in groups
    ]


def run_updates(
    head: Head,
    groups: Sequence[Group],
    terms: Terms,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    *,
    seed: int,
    done: int = 0,
    log: Log = quiet,
) -> StepResult:
    """One step: each group once, ``minibatch_questions`` groups an optimizer update.

    The groups go in an order drawn from the seed. Old log-probabilities that are missing are
    computed once, before the first update; where there is a single update, they are the current
    ones, detached. The learning rate rises linearly over ``warmup_steps`` updates and stays.

    An update whose gradient norm is not finite, or above ``skip_grad_norm``, is left out and said.

    Args:
        head: the policy; left in training mode.
        groups: of the mixed batch, in a fixed order; not empty.
        terms: the objective.
        optimizer: over the policy's trainable parameters.
        settings: learning rate, warm-up, norms, mini- and micro-batch sizes.
        seed: of the order.
        done: optimizer updates done before this step.
        log: gets a line an update.
    """
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    chunks = even_chunks(len(groups), settings.minibatch_questions)
    if len(chunks) > 1:
        groups = fill_old(head, groups, terms, settings.tokens_per_microbatch, settings.autocast)
    parameters = list(trainable(head.model).values())
    head.model.train()
    result = StepResult({}, [], [], 0, 0, settings.learning_rate, done)
    for number, chunk in enumerate(chunks, start=1):
        rows = [row for index in chunk for row in groups[order[index]]]
        optimizer.zero_grad(set_to_none=True)
        gradient = accumulate_gradient(
            head, rows, terms, settings.tokens_per_microbatch, settings.autocast
        )
        if not gradient.sums:  # nothing to learn from: a gradient of 0, which still moves momentum
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        if gradient.faulty:
            norm = math.nan
        loss = gradient.sums.pop("loss", 0.0)
        result.sums = objective.merge_sums(result.sums, gradient.sums)
        result.losses.append(loss)
        result.norms.append(norm)
        what = f"update {number}/{len(chunks)}: loss {loss:.4g}, gradient norm {norm:.4g}"
        limit = settings.skip_grad_norm
        if not math.isfinite(norm) or (limit is not None and norm > limit):
            result.skipped += 1
            why = "not finite" if not math.isfinite(norm) else f"above skip_grad_norm = {limit:g}"
            log(f"{what}; SKIPPED, its gradient is {why}")
            if gradient.faulty:
                log(f"the loss is not finite in: {', '.join(gradient.faulty)}")
            continue
        warm = min(1.0, (result.total_updates + 1) / max(settings.warmup_steps, 1))
        result.learning_rate = settings.learning_rate * warm
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.step()
        result.updates += 1
        result.total_updates += 1
        log(f"{what}, learning rate {result.learning_rate:.3g}")
    optimizer.zero_grad(set_to_none=True)
    return result


def make_optimizer(model: torch.nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; one kernel for all of them on a GPU, and plain,
    bit-reproducible arithmetic on a CPU."""
    parameters = list(trainable(model).values())
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=parameters[0].device.type == "cuda",
    )
