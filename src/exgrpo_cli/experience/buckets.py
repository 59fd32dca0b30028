"""How many questions come from each bucket."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from exgrpo_cli.errors import InputError


def bucket_probabilities(log_weights: Mapping[int, float]) -> dict[int, float]:
    """The chance that a single draw goes to each bucket that holds questions, from their log
    weights by count of successes k, which are known up to a constant
    (``sql/bucket_weights.sql``)."""
    top = max(log_weights.values(), default=-math.inf)
    if top == -math.inf:
        raise InputError(
            "no bucket has any weight, so no question can be drawn for replay;"
            " write another rule curate.bucket_weight"
        )
    weights = {count: math.exp(w - top) for count, w in sorted(log_weights.items())}
    total = math.fsum(weights.values())
    return {count: weight / total for count, weight in weights.items()}


def draw_counts(
    sizes: Mapping[int, int], log_weights: Mapping[int, float], draw: int, rng: random.Random
) -> dict[int, int]:
    """How many questions come from each bucket.

    One multinomial draw; what exceeds a bucket's size is handed out one at a time among the
    buckets with room, by the same weights.

    Args:
        sizes: questions by bucket; their sum is at least ``draw``.
        log_weights: of the buckets that hold questions.
        draw: questions wanted.
        rng: only its ``random()`` is used, which is the same in every version of Python.
    """

    def pick(probabilities: Mapping[int, float]) -> int:
        point = rng.random()
        for count, probability in probabilities.items():
            if point < probability:
                return count
            point -= probability
        return max(count for count, p in probabilities.items() if p > 0)  # a rounding remainder

    held = {count: w for count, w in log_weights.items() if sizes[count] > 0}
    probabilities = bucket_probabilities(held)
    counts = dict.fromkeys(probabilities, 0)
    for _ in range(draw):
        counts[pick(probabilities)] += 1
    excess = sum(max(0, n - sizes[count]) for count, n in counts.items())
    counts = {count: min(n, sizes[count]) for count, n in counts.items()}
    for _ in range(excess):
        room = {count: w for count, w in held.items() if counts[count] < sizes[count]}
        counts[pick(bucket_probabilities(room))] += 1
    return counts
