"""The mixed-policy objective of ExGRPO (arXiv 2510.02245), as pure tensor functions.

Tokens are flat: one-dimensional tensors over the response tokens of all rows, in any order, with
no padding. What a token's loss is divided by is a *weight* of its row, made from the whole
mini-batch (:func:`row_weights`); the loss is the plain sum of weight times token loss. So a
mini-batch can be cut into micro-batches anywhere and their gradients add up to the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats; exp of it, 5e8, is far from anything that training could use."""

Sums = dict[str, float]
"""Sums over tokens, to be added up over micro-batches by :func:`merge_sums`."""


def group_advantages(
    rewards: Tensor, groups: Tensor, divide_by_std: bool = False, epsilon: float = 1e-6
) -> Tensor:
    """Group-relative advantages: reward minus the mean of its group (GRPO, arXiv 2402.03300).

    A group whose rewards are all equal gets exactly 0; a group of one keeps its reward (its mean
    counts as 0 and its deviation as 1), as in verl.

    Args:
        rewards: ``[N]`` float, one a row.
        groups: ``[N]`` int64, the group's number of each row, from 0; rows need not be sorted.
        divide_by_std: also divide by the group's sample deviation (n - 1) plus ``epsilon``.
        epsilon: see ``divide_by_std``.

    Returns:
        ``[N]`` of the rewards' dtype; computed in float64.
    """
    if rewards.numel() == 0:
        return rewards.clone()
    values = rewards.double()
    count = int(groups.max()) + 1
    zeros = values.new_zeros(count)
    sizes = zeros.index_add(0, groups, torch.ones_like(values)).clamp(min=1)
    mean = zeros.index_add(0, groups, values) / sizes
    low = zeros.scatter_reduce(0, groups, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, groups, values, "amax", include_self=False)
    # Rounding in the mean must not make a tiny advantage out of equal rewards.
    mean = torch.where(low == high, low, mean)
    alone = sizes == 1
    mean = mean.masked_fill(alone, 0.0)
    advantages = values - mean[groups]
    if divide_by_std:
        squares = zeros.index_add(0, groups, advantages.square())
        deviation = (squares / (sizes - 1).clamp(min=1)).sqrt().masked_fill(alone, 1.0)
        advantages = advantages / (deviation[groups] + epsilon)
    return advantages.to(rewards.dtype)


def row_weights(lengths: Tensor, aggregate: str, length_divisor: int) -> Tensor:
    """What every token of a row is multiplied by; the loss is the sum over tokens.

    Args:
        lengths: ``[N]`` integer, response tokens of each row of the mini-batch, 0 for none.
        aggregate: ``fixed_length``: token sum / ``length_divisor``, mean over rows;
            ``token_mean``: mean over all tokens; ``sequence_mean``: mean over rows of each row's
            token mean.
        length_divisor: the fixed length of ``fixed_length``.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: an unknown ``aggregate``.
    """
    rows = max(lengths.numel(), 1)
    tokens = lengths.double()
    if aggregate == "fixed_length":
        return torch.full_like(tokens, 1.0 / (rows * length_divisor))
    if aggregate == "token_mean":
        return torch.full_like(tokens, 1.0 / max(float(tokens.sum()), 1.0))
    if aggregate == "sequence_mean":
        return 1.0 / (rows * tokens.clamp(min=1))
    raise ValueError(f"unknown aggregate {aggregate!r}")


def shape_ratio(log_ratio: Tensor, shaping: str, beta: float, power: float) -> Tensor:
    """Policy shaping f(w*) of a replayed token's ratio w* = exp(log pi - log pi_past).

    ``ratio``: w* / (w* + beta), here as the sigmoid of ``log w* - log beta``, which cannot
    overflow. ``power``: w* to a power. ``sqrt``: its square root. ``none``, and ``clip``, which
    :func:`policy_loss` does: w* itself. ``uncorrected``: 1, with the gradient of log pi, as if the
    policy in training had sampled the token.

    Args:
        log_ratio: any shape, log w*, nats.
        shaping: see above.
        beta: of ``ratio``.
        power: exponent of ``power``.

    Returns:
        The shaped ratio, of the same shape and dtype.

    Raises:
        ValueError: an unknown ``shaping``.
    """
    if shaping == "ratio":
        shaped = torch.sigmoid(log_ratio - math.log(beta))
    elif shaping in ("none", "clip"):
        shaped = _bounded(log_ratio).exp()
    elif shaping == "uncorrected":
        shaped = (log_ratio - log_ratio.detach()).exp()
    elif shaping == "power":
        shaped = _bounded(power * log_ratio).exp()
    elif shaping == "sqrt":
        shaped = _bounded(0.5 * log_ratio).exp()
    else:
        raise ValueError(f"unknown shaping {shaping!r}")
    return shaped


@dataclass(frozen=True)
class Clip:
    """PPO's clipping: ratios are clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """``[T]``: max(-A w, -A clip(w)). Where it is the second, w has no gradient."""
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        return torch.maximum(-advantages * ratio, -advantages * bounded)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    replayed: Tensor,
    *,
    clip: Clip | None,
    shaping: str,
    beta: float,
    power: float = 0.5,
    past_clip: Clip | None = None,
    sequences: Tensor | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Sums]:
    """The loss of every token, not yet weighted, and the sums that its metrics are made of.

    Fresh: -A w with w = pi / pi_old, or PPO's clipped max(-A w, -A clip(w)). Replayed:
    -A f(w*) with w* = pi / pi_past and f the policy shaping, or PPO's clipped loss of w* where
    ``shaping`` is ``clip``. Where f is bounded by
    1, so is what a replayed failure (A < 0) pushes down: at most |A| a token, and the less the
    further the policy has left it already.

    Args:
        logprobs: ``[T]`` under the policy in training, with gradient, nats.
        old_logprobs: ``[T]``: of the sampling policy for fresh tokens, as recorded at collection
            for replayed ones.
        advantages: ``[T]``, each token that of its row.
        replayed: ``[T]`` bool.
        clip: None for no clipping.
        shaping: see :func:`shape_ratio`, as ``beta`` and ``power``.
        beta: see ``shaping``.
        power: see ``shaping``.
        past_clip: the bounds of ``shaping = "clip"``.
        sequences: ``[T]`` int64, the row of each token: a fresh token's w is then that of its
            row, exp of the mean log-ratio of its tokens (GSPO, arXiv 2507.18071).
        dual_clip: where A < 0, w counts as at most this (dual clip, arXiv 1912.09729).

    Returns:
        ``[T]`` token losses with gradient, and :data:`Sums`.
    """
    log_ratio = logprobs - old_logprobs
    fresh = (~replayed).nonzero().squeeze(-1)
    past = replayed.nonzero().squeeze(-1)

    fresh_log_ratio = log_ratio[fresh]
    if sequences is not None:
        fresh_log_ratio = _row_means(fresh_log_ratio, sequences[fresh])
    ratio = _bounded(fresh_log_ratio).exp()
    fresh_advantages = advantages[fresh]
    fresh_loss = -fresh_advantages * ratio
    clipped = torch.zeros_like(ratio)
    if clip is not None:
        bounded = clip.loss(ratio, fresh_advantages)
        clipped = (bounded > fresh_loss).to(ratio.dtype)
        fresh_loss = bounded
    if dual_clip is not None:
        least = torch.minimum(fresh_loss, -fresh_advantages * dual_clip)
        fresh_loss = torch.where(fresh_advantages < 0, least, fresh_loss)

    shaped = shape_ratio(log_ratio[past], shaping, beta, power)
    past_loss = -advantages[past] * shaped
    if past_clip is not None:
        past_loss = past_clip.loss(shaped, advantages[past])

    losses = torch.zeros_like(log_ratio).index_copy(0, fresh, fresh_loss)
    losses = losses.index_copy(0, past, past_loss)
    with torch.no_grad():
        values = torch.stack(
            [
                fresh_loss.sum(),
                ratio.sum(),
                clipped.sum(),
                -log_ratio[fresh].sum(),
                past_loss.sum(),
                shaped.sum(),
                -log_ratio[past].sum(),
                ratio.max() if ratio.numel() else ratio.new_tensor(-math.inf),
                (ratio - 1).square().sum(),
            ]
        )
    names = (
        "fresh_loss",
        "ratio",
        "clipped",
        "fresh_kl",
        "replayed_loss",
        "shaped",
        "replayed_kl",
        "ratio_max",
        "ratio_variance",
    )
    sums = dict(zip(names, values.tolist(), strict=True))
    return losses, sums | {"fresh": float(fresh.numel()), "replayed": float(past.numel())}


def _bounded(log_ratio: Tensor) -> Tensor:
    """Log-ratios within the bound, so that no exp overflows; what is not finite stays, to be
    found."""
    held = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isfinite(), held, log_ratio)


def _row_means(values: Tensor, rows: Tensor) -> Tensor:
    """``[T]``: each token gets the mean of its row."""
    if not values.numel():
        return values
    zeros = values.new_zeros(int(rows.max()) + 1)
    sizes = zeros.index_add(0, rows, torch.ones_like(values)).clamp(min=1)
    return (zeros.index_add(0, rows, values) / sizes)[rows]


def truncated_importance(mismatch: Tensor, cap: float) -> Tensor:
    """Weights that correct for tokens that another distribution drew: min(exp(mismatch), cap).

    Rollout engines compute with other kernels and in fewer bits than the trainer, so their tokens
    come from a slightly other distribution (truncated importance sampling: F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).

    Args:
        mismatch: any shape, the trainer's log-probability minus the engine's, both of the policy
            that sampled, nats.
        cap: the greatest weight.

    Returns:
        The same shape, without gradient.
    """
    return mismatch.detach().exp().clamp(max=cap)


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(pi || reference) at each token: x - log x - 1, x = reference / pi.

    Unbiased for tokens sampled from pi, and never negative (J. Schulman, "Approximating KL
    divergence", 2020).

    Args:
        logprobs: any shape, under the policy in training, nats.
        reference: same shape, under the reference policy.

    Returns:
        The same shape, nats.
    """
    log_ratio = reference - logprobs
    return log_ratio.expm1() - log_ratio


def entropy_bonus(entropies: Tensor, coefficient: float, tokens: int) -> Tensor:
    """The entropy bonus as a term of the loss: minus the coefficient times the token mean.

    Always the mean over all tokens of the mini-batch, whatever the policy term's aggregate.

    Args:
        entropies: ``[T]`` of these tokens, with gradient, nats.
        coefficient: of the bonus.
        tokens: response tokens of the whole mini-batch.

    Returns:
        A scalar.
    """
    return entropies.sum() * (-coefficient / max(tokens, 1))


def merge_sums(one: Mapping[str, float], other: Mapping[str, float]) -> Sums:
    """Add up two :data:`Sums`; of ``*_max`` the greater one stays (and not a number wins)."""
    merged = dict(one)
    for name, value in other.items():
        if name not in merged:
            merged[name] = value
        elif name.endswith("_max"):
            largest = max(merged[name], value)
            merged[name] = merged[name] + value if math.isnan(merged[name] + value) else largest
        else:
            merged[name] += value
    return merged


def summarise(sums: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics of :func:`policy_loss`; None where there was no such token.

    - ``on_policy_loss``, ``off_policy_loss``: token means over the fresh, the replayed tokens;
      they do not add up to the loss, which weighs rows.
    - ``ratio_mean``, ``ratio_max``: of fresh tokens' ratios, before clipping; ``ratio_std``: their
      standard deviation about 1, which is their expectation.
    - ``clip_fraction``: share of the fresh tokens whose clipped loss was taken.
    - ``shaped_ratio_mean``: of replayed tokens, after shaping.
    - ``kl_old``: mean of old minus new log-probability over all tokens (the k1 estimate).
    - ``kl_replayed``: the same over replayed tokens: how far the policy has moved from those that
      collected them.
    """
    fresh, past = sums.get("fresh", 0.0), sums.get("replayed", 0.0)

    def mean(name: str, count: float) -> float | None:
        return sums[name] / count if count else None

    variance = mean("ratio_variance", fresh)
    return {
        "on_policy_loss": mean("fresh_loss", fresh),
        "off_policy_loss": mean("replayed_loss", past),
        "ratio_mean": mean("ratio", fresh),
        "ratio_max": sums["ratio_max"] if fresh else None,
        "ratio_std": None if variance is None else math.sqrt(variance),
        "clip_fraction": mean("clipped", fresh),
        "shaped_ratio_mean": mean("shaped", past),
        "kl_old": (sums["fresh_kl"] + sums["replayed_kl"]) / (fresh + past)
        if fresh + past
        else None,
        "kl_replayed": mean("replayed_kl", past),
    }
