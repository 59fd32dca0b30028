"""Cutting rows into batches of bounded size."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence


def packs(lengths: Sequence[int], tokens: int, multiple: int = 1) -> list[list[int]]:
    """Rows in packs of at most ``tokens`` tokens, without padding, of nearly equal sizes.

    As few packs as longest-first packing into the emptiest one allows, so that no pass is a small
    remainder and several processes that take a pack each wait little for each other. Every row is
    in exactly one pack; a row that is longer than the budget gets a pack of its own.

    Args:
        lengths: of each row, tokens.
        tokens: the budget: sum over a pack's rows.
        multiple: the number of packs is a multiple of this; the last ones may be empty.

    Returns:
        Row numbers, pack by pack, fullest first (so that one that does not fit in memory fails at
        once, not at the end), longest first in a pack; the same for the same input.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    full = sum(min(length, tokens) for length in lengths) // tokens  # a longer row is one pack
    count = -(-max(full, 1) // multiple) * multiple
    while True:
        found = _emptiest_first(lengths, order, count)
        loads = [sum(lengths[row] for row in pack) for pack in found]
        if all(load <= tokens or len(pack) == 1 for load, pack in zip(loads, found, strict=True)):
            return [found[i] for i in sorted(range(count), key=lambda i: (-loads[i], i))]
        count += multiple


def _emptiest_first(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """The rows in their order, each into the pack that is the emptiest so far."""
    result: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, pack) for pack in range(count)]
    for row in order:
        load, pack = heapq.heappop(heap)
        result[pack].append(row)
        heapq.heappush(heap, (load + lengths[row], pack))
    return result


def padded_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows in right-padded batches of at most ``tokens`` tokens, padding counted.

    Rows of like length go together, longest first. Every row is in exactly one batch; a row that
    is longer than the budget gets a batch of its own.

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


def rounds(
    lengths: Sequence[int], tokens: int, *, packed: bool, ranks: int = 1
) -> list[list[list[int]]]:
    """Micro-batches in rounds: in each, every process has one, all of like size.

    Args:
        lengths: of each row, tokens.
        tokens: the budget of a micro-batch.
        packed: by :func:`packs`, else by :func:`padded_batches`.
        ranks: how many processes there are.

    Returns:
        Row numbers by round and process; a process's last micro-batches may be empty.
    """
    batches = packs(lengths, tokens, ranks) if packed else padded_batches(lengths, tokens)
    batches += [[] for _ in range(-len(batches) % ranks)]
    return [batches[i : i + ranks] for i in range(0, len(batches), ranks)]


def even_chunks(count: int, size: int) -> list[range]:
    """``count`` items in the fewest chunks of at most ``size``, as equal in size as can be.

    So no optimizer update is made of a small remainder.
    """
    chunks = max(-(-count // size), 1)
    bounds = [count * i // chunks for i in range(chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
