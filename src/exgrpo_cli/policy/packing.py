"""Cutting rows into batches of bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows in right-padded batches of at most ``tokens`` tokens, padding counted.

    Rows of like length go together, longest first (so that a batch that does not fit in memory
    fails at once, not at the end). Every row is in exactly one batch; a row that is longer than
    the budget gets a batch of its own.

    Args:
        lengths: of each row, tokens.
        tokens: the budget: rows of a batch times its longest row.

    Returns:
        Row numbers, batch by batch; the same for the same input.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    longest = 0
    for row in order:
        if batches and (len(batches[-1]) + 1) * longest <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = max(lengths[row], 1)
    return batches


def even_chunks(count: int, size: int) -> list[range]:
    """``count`` items in the fewest chunks of at most ``size``, as equal in size as can be.

    So no optimizer update is made of a small remainder.
    """
    chunks = max(-(-count // size), 1)
    bounds = [count * i // chunks for i in range(chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
