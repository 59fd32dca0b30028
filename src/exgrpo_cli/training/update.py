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

from exgrpo_cli.models import autocasts
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.progress import progress as counted
from exgrpo_cli.recipe import Autocast, ObjectiveSettings, TrainSettings
from exgrpo_cli.training import distributed, objective
from exgrpo_cli.training.batch import Group, Row
from exgrpo_cli.training.head import Head
from exgrpo_cli.training.logprobs import score_sequences, token_statistics
from exgrpo_cli.training.objective import Clip, Sums
from exgrpo_cli.training.packing import even_chunks, rounds
from exgrpo_cli.training.policy import trainable


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


@dataclass(frozen=True)
class RowReport:
    """What a row did to a mini-batch's gradient, to find the one that spoilt it."""

    rollout_id: str
    replayed: bool
    tokens: int
    advantage: float
    loss: float
    """The row's share of the mini-batch's loss."""
    finite: bool
    log_ratio_max: float
    """The largest |log pi - log pi_old| of its tokens, nats."""
    logprob_min: float
    """Of its tokens, nats."""


@dataclass
class Gradient:
    """What a mini-batch's backward passes left besides the gradient itself."""

    sums: Sums = field(default_factory=dict)
    rows: list[RowReport] = field(default_factory=list)
    """Of the rows that were run."""

    @property
    def faulty(self) -> list[str]:
        """Rollouts whose loss is not finite, or all where only their sum is not."""
        bad = [row.rollout_id for row in self.rows if not row.finite]
        if bad or math.isfinite(self.sums.get("loss", 0.0)):
            return bad
        return [row.rollout_id for row in self.rows]


@dataclass(frozen=True)
class Skipped:
    """An update that was left out."""

    update: int
    """Its number in the step, from 1."""
    reason: str
    norm: float
    rows: list[RowReport]


@dataclass
class StepResult:
    """One step's updates, for the metrics."""

    sums: Sums
    losses: list[float]
    norms: list[float]
    updates: int
    skipped: list[Skipped]
    learning_rate: float
    total_updates: int
    said: list[str] = field(default_factory=list)
    """About updates that were left out."""


def autocast(device: torch.device, setting: Autocast) -> Any:
    """bfloat16 compute where :func:`exgrpo_cli.models.autocasts` says so; float32 otherwise."""
    if autocasts(device, setting):
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def accumulate_gradient(
    head: Head,
    rows: Sequence[Row],
    terms: Terms,
    tokens_per_microbatch: int,
    use_autocast: Autocast,
) -> Gradient:
    """Add a mini-batch's gradient to the parameters', micro-batch by micro-batch.

    The denominators are those of the whole mini-batch, so the gradient does not depend on how it
    is cut, nor on how many processes share it. Rows without advantage are left out where no other
    term needs them: their gradient is 0. Rows without tokens count as rows. Every process gets all
    rows, and the sums and reports of all processes.
    """
    settings = terms.settings
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    weights = objective.row_weights(lengths, settings.aggregate, terms.length_divisor).tolist()
    tokens = int(lengths.sum())
    active = [
        index
        for index, row in enumerate(rows)
        if len(row.token_ids) and (row.advantage != 0 or terms.needs_all_rows)
    ]
    result = Gradient()
    sizes = [rows[i].length for i in active]
    packed, ranks = bool(head.packed), distributed.ranks()
    for batches in rounds(sizes, tokens_per_microbatch, packed=packed, ranks=ranks):
        chosen = [active[i] for i in batches[distributed.rank()]]
        _micro_batch(
            head,
            [rows[i] for i in chosen],
            [weights[i] for i in chosen],
            tokens,
            terms,
            use_autocast,
            result,
        )
    merged = Gradient()
    for part in distributed.gather(result):
        merged.sums = objective.merge_sums(merged.sums, part.sums)
        merged.rows.extend(part.rows)
    return merged


def _micro_batch(
    head: Head,
    rows: Sequence[Row],
    weights: Sequence[float],
    tokens: int,
    terms: Terms,
    use_autocast: Autocast,
    result: Gradient,
) -> None:
    """One forward and backward pass; what it left is added to ``result``.

    Args:
        rows: with tokens each; none where other processes have more to do.
        tokens: response tokens of the whole mini-batch.
    """
    settings = terms.settings
    device = next(head.model.parameters()).device
    with autocast(device, use_autocast):
        logprobs, entropies = token_statistics(
            head,
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            terms.temperature,
        )
    assert entropies is not None
    if not rows:
        (logprobs.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]
        return
    sizes = torch.tensor([len(row.token_ids) for row in rows])
    current = logprobs.detach().cpu()
    olds = [
        part if row.old is None else row.old
        for row, part in zip(rows, _by_row(current, rows), strict=True)
    ]
    old = torch.cat(olds)

    def spread(values: Sequence[float]) -> Tensor:
        """A value of each row, on each of its tokens."""
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes).to(logprobs)

    replayed = torch.tensor([row.replayed for row in rows]).repeat_interleave(sizes)
    past_clip = objective.Clip(settings.clip_low, settings.clip_high)
    numbers = torch.arange(len(rows)).repeat_interleave(sizes).to(device)
    losses, sums = objective.policy_loss(
        logprobs,
        old.to(logprobs),
        spread([row.advantage for row in rows]),
        replayed.to(device),
        clip=terms.clip,
        shaping=settings.shaping,
        beta=settings.beta,
        power=settings.power,
        past_clip=past_clip if settings.shaping == "clip" else None,
        sequences=numbers if settings.ratio == "sequence" else None,
        dual_clip=settings.dual_clip,
    )
    samplers = [
        part if row.sampler is None else row.sampler for row, part in zip(rows, olds, strict=True)
    ]
    mismatch = old - torch.cat(samplers)  # 0 for replayed tokens
    if settings.sampler_cap is not None:
        correction = objective.truncated_importance(mismatch, settings.sampler_cap)
        losses = losses * correction.to(logprobs)
        sums["sampler_capped"] = float((mismatch > math.log(settings.sampler_cap)).sum())
    if settings.kl > 0:
        reference = torch.cat([_present(row.reference) for row in rows]).to(logprobs)
        kl = objective.k3_kl(logprobs, reference)
        losses = losses + settings.kl * kl
        sums["kl_reference"] = float(kl.detach().sum())
    weighted = spread(weights) * losses
    loss = weighted.sum()
    if settings.entropy_bonus > 0:
        loss = loss + objective.entropy_bonus(entropies, settings.entropy_bonus, tokens)
    sums |= {"loss": float(loss.detach()), "tokens": float(logprobs.numel())}
    sums["entropy"] = float(entropies.detach().sum())
    sums |= _sampler_mismatch(mismatch[torch.cat([_sampled(row) for row in rows])])
    result.sums = objective.merge_sums(result.sums, sums)
    finite = (weighted.detach() + entropies.detach()).isfinite().cpu()
    result.rows.extend(
        RowReport(
            rollout_id=row.rollout_id,
            replayed=row.replayed,
            tokens=len(row.token_ids),
            advantage=row.advantage,
            loss=float(share.sum()),
            finite=bool(is_finite.all()),
            log_ratio_max=float(gap.abs().max()),
            logprob_min=float(part.min()),
        )
        for row, share, is_finite, gap, part in zip(
            rows,
            _by_row(weighted.detach().cpu(), rows),
            _by_row(finite, rows),
            _by_row(current - old, rows),
            _by_row(current, rows),
            strict=True,
        )
    )
    # FSDP takes the mean over the processes; the loss is a sum.
    (loss * distributed.ranks()).backward()  # type: ignore[no-untyped-call]


def _by_row(flat: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """Flat tokens, cut into each row's."""
    ends = list(itertools.accumulate(len(row.token_ids) for row in rows))
    return [flat[a:b] for a, b in itertools.pairwise([0, *ends])]


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _sampled(row: Row) -> Tensor:
    """``[tokens]`` bool, whether the rollout engine's log-probabilities are known."""
    return torch.full((len(row.token_ids),), row.sampler is not None)


def _sampler_mismatch(mismatch: Tensor) -> Sums:
    """How far the engine's log-probabilities are from the trainer's, over ``[fresh tokens]``,
    nats."""
    if not mismatch.numel():
        return {}
    ratio = mismatch.double().exp()
    return {
        "sampler_tokens": float(mismatch.numel()),
        "sampler_difference": float(mismatch.abs().sum()),
        "sampler_difference_max": float(mismatch.abs().max()),
        "sampler_ratio": float(ratio.sum()),
        "sampler_ratio_square": float(ratio.square().sum()),
        "sampler_ratio_max": float(ratio.max()),
    }


def fill_old(
    head: Head, groups: Sequence[Group], terms: Terms, tokens_per_batch: int, use_autocast: Autocast
) -> list[Group]:
    """Give the rows that have no old log-probabilities those of the policy as it is now."""
    rows = [row for group in groups for row in group if row.old is None]
    if not rows:
        return [list(group) for group in groups]
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


def learning_rate(settings: TrainSettings, updates: int, progress: float) -> float:
    """The learning rate of an update: linear warm-up, then the schedule.

    Args:
        updates: made before, since the run began.
        progress: share of the run that is done, from 0 to 1; at 1 the schedule has come down to
            ``min_learning_rate``.
    """
    peak, low = settings.learning_rate, min(settings.min_learning_rate, settings.learning_rate)
    if settings.schedule == "linear":
        share = 1 - progress
    elif settings.schedule == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        share = 1.0
    warm = min(1.0, (updates + 1) / max(settings.warmup_steps, 1))
    return warm * (peak if share == 1.0 else low + (peak - low) * share)


def run_updates(
    head: Head,
    groups: Sequence[Group],
    terms: Terms,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    *,
    seed: int,
    done: int = 0,
    progress: tuple[float, float] = (0.0, 0.0),
    log: Log = quiet,
) -> StepResult:
    """One step: each group once, ``minibatch_questions`` groups an optimizer update.

    The groups go in an order drawn from the seed. Old log-probabilities that are missing are
    computed once, before the first update; where there is a single update, they are the current
    ones, detached. The learning rate is that of :func:`learning_rate`.

    An update whose gradient norm is not finite, or above ``skip_grad_norm``, is left out and said.

    Args:
        groups: of the mixed batch, in a fixed order; not empty.
        settings: learning rate, warm-up, norms, mini- and micro-batch sizes.
        done: optimizer updates done before this step.
        progress: share of the run that is done before and after this step.
    """
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    chunks = even_chunks(len(groups), settings.minibatch_questions)
    if len(chunks) > 1:
        groups = fill_old(head, groups, terms, settings.tokens_per_microbatch, settings.autocast)
    parameters = list(trainable(head.model).values())
    head.model.train()
    result = StepResult({}, [], [], 0, [], settings.learning_rate, done)
    with counted("updates", len(chunks), log) as advance:
        for number, chunk in enumerate(chunks, start=1):
            rows = [row for index in chunk for row in groups[order[index]]]
            optimizer.zero_grad(set_to_none=True)
            gradient = accumulate_gradient(
                head, rows, terms, settings.tokens_per_microbatch, settings.autocast
            )
            advance(1, sum(len(row.token_ids) for row in rows))
            # Nothing to learn from is a gradient of 0, which still moves momentum.
            if not gradient.sums:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            total = distributed.full(
                torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            )
            torch.nn.utils.clip_grads_with_norm_(parameters, settings.max_grad_norm, total)
            norm = float(total)
            faulty = gradient.faulty
            if faulty:
                norm = math.nan
            loss = gradient.sums.pop("loss", 0.0)
            result.sums = objective.merge_sums(result.sums, gradient.sums)
            result.losses.append(loss)
            result.norms.append(norm)
            what = f"update {number}/{len(chunks)}: loss {loss:.4g}, gradient norm {norm:.4g}"
            limit = settings.skip_grad_norm
            if not math.isfinite(norm) or (limit is not None and norm > limit):
                why = f"above skip_grad_norm = {limit:g}" if math.isfinite(norm) else "not finite"
                result.said.append(f"{what}; SKIPPED, its gradient is {why}")
                log(result.said[-1])
                if faulty:
                    result.said.append(f"the loss is not finite in: {', '.join(faulty)}")
                    log(result.said[-1])
                result.skipped.append(Skipped(number, f"gradient {why}", norm, gradient.rows))
                continue
            share = progress[0] + (progress[1] - progress[0]) * (number - 1) / len(chunks)
            result.learning_rate = learning_rate(settings, result.total_updates, share)
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
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=parameters[0].device.type == "cuda",
    )
