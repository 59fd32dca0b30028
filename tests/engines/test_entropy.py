"""Entropies estimated from the most probable tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from exgrpo_cli.engines.entropy import topk_entropy


def ranked(p: np.ndarray) -> tuple[np.ndarray, float]:
    """Log-probabilities, highest first, and the exact entropy."""
    p = np.sort(np.asarray(p, dtype=float) / np.sum(p))[::-1]
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    return logs, float(-(p[p > 0] * logs[p > 0]).sum())


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3, 2.0, 4.0])
def test_exact_where_the_tail_is_what_it_is_taken_for(exponent: float) -> None:
    """Zipf's law, and with exponent 0 the uniform distribution; k = 20 of 150 000 tokens."""
    logs, exact = ranked(np.arange(1, 150_001, dtype=float) ** -exponent)
    (estimate,) = topk_entropy(logs[None, :20], 150_000)
    assert estimate == pytest.approx(exact, abs=0.03)


def test_exact_where_all_tokens_or_all_of_the_mass_are_known() -> None:
    logs, exact = ranked(np.array([0.7, 0.2, 0.1]))
    assert topk_entropy(logs[None], 3)[0] == pytest.approx(exact)
    assert topk_entropy(logs[None], 50_000)[0] == pytest.approx(exact)
    certain = np.array([[0.0, -np.inf, -np.inf]])
    assert topk_entropy(certain, 50_000)[0] == 0.0


@given(
    arrays(float, st.integers(6, 60), elements=st.floats(0, 12)),
    st.integers(1, 5),
)
def test_between_the_least_and_the_most_that_the_tail_can_have(logits: np.ndarray, k: int) -> None:
    logs, exact = ranked(np.exp(logits))
    head = np.exp(logs[:k])
    mass, others = max(1.0 - head.sum(), 0.0), len(logs) - k
    known = -(head * logs[:k]).sum()
    (estimate,) = topk_entropy(logs[None, :k], len(logs))
    most = known + (mass * np.log(others / mass) if mass > 0 else 0.0)
    assert known - mass * logs[k - 1] - 1e-4 <= estimate <= most + 1e-4
    assert exact <= most + 1e-4


def test_positions_do_not_mix() -> None:
    rows = [ranked(np.arange(1, 1001) ** -a)[0][:8] for a in (0.5, 1.5, 3.0)]
    together = topk_entropy(np.stack(rows), 1000)
    assert together.tolist() == [topk_entropy(row[None], 1000)[0] for row in rows]
