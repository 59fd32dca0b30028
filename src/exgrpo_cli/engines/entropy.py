"""Entropy of a distribution of which only the most probable tokens are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_HALVINGS = 40


def topk_entropy(logprobs: NDArray[Any], vocabulary: int) -> NDArray[np.float64]:
    """Estimate entropies from the k most probable tokens and the mass that they leave.

    The known tokens contribute ``-sum p log p``. Of the others only their number, N = V - k, their
    mass m, and a bound are known: none is above p_k. That places their contribution between
    ``-m log p_k`` (few tokens, each at the bound) and ``m log(N / m)`` (all alike). In between, the
    tail is taken to follow Zipf's law from the k-th token on, ``p(r) = p_k (k / r)^a`` for ranks
    r in (k, V], with the exponent a >= 0 at which its mass is m; a = 0 is the upper bound.

    Args:
        logprobs: ``[T, k]``, nats, the k most probable tokens of each position, highest first; of
            the distribution that was sampled.
        vocabulary: V.

    Returns:
        ``[T]`` float64, nats.
    """
    head = np.asarray(logprobs, dtype=np.float64)
    k = head.shape[1]
    p = np.exp(head)
    known: NDArray[np.float64] = -(p * np.where(p > 0, head, 0.0)).sum(axis=1)
    others = vocabulary - k
    mass = 1.0 - p.sum(axis=1)
    if others <= 0:
        return known
    # float32 log-probabilities sum to 1 within about 1e-6: less than that is no tail
    there = (mass > 1e-6) & (p[:, -1] > 0)
    mass, log_bound = mass[there], head[there, -1]
    at_bound = k * np.exp(log_bound)
    # With s = a - 1, u = log(r / k) and L = log(V / k), the tail's mass is k p_k (1 - e^(-sL)) / s,
    # which falls in s; and its entropy -m log p_k + a k p_k (1 - e^(-sL) (1 + sL)) / s^2.
    span = np.log(vocabulary / k)
    low, high = np.full(mass.shape, -1.0), np.full(mass.shape, 1e4)
    for _ in range(_HALVINGS):
        s = _nonzero((low + high) / 2)
        heavier = at_bound * -np.expm1(-s * span) / s > mass
        low, high = np.where(heavier, s, low), np.where(heavier, high, s)
    s = _nonzero((low + high) / 2)
    tail = -mass * log_bound + (s + 1) * at_bound * (
        (1 - np.exp(-s * span) * (1 + s * span)) / s**2
    )
    known[there] += np.clip(tail, -mass * log_bound, mass * np.log(others / mass))
    return known


def _nonzero(s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Away from 0, where the formulas above are limits (and their differences lose all digits)."""
    moved: NDArray[np.float64] = np.where(np.abs(s) < 1e-4, 1e-4, s)
    return moved
