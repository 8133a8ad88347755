"""The order in which devices should stand in a ring, so that neighbours have good links. Pure.

A ring is as fast as its slowest link, so orders are compared by their worst link, then by the second worst, and so on.
Up to 8 devices every order is tried; beyond, the best nearest-neighbour tour is improved by reversing parts (2-opt).
Source: Croes, Operations Research 6(6), 1958 (2-opt).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

EXACT = 8
Ranks = Sequence[Sequence[int]]


def quality(order: Sequence[int], ranks: Ranks) -> tuple[int, ...]:
    """Return the ring's link ranks, the worst first: the larger of two, as tuples, is the better ring."""
    return tuple(sorted(ranks[a][b] for a, b in itertools.pairwise([*order, order[0]]))) if len(order) > 1 else ()


def ring_order(ranks: Ranks) -> tuple[int, ...]:
    """Return positions 0 .. n-1 in ring order, from 0 on; of equally good ones the first in alphabetical order.

    ranks: symmetric matrix; the larger, the better the link (``gpus.Machine.ranks()``). Raises: ValueError.
    """
    count = len(ranks)
    if any(len(row) != count for row in ranks):
        raise ValueError(f"ring_order: {count} rows, but not each has {count} columns")
    if any(ranks[a][b] != ranks[b][a] for a in range(count) for b in range(a)):
        raise ValueError("ring_order: a link has two ranks, one for each direction")
    if count < 3:
        return tuple(range(count))
    if count > EXACT:
        return _improved(
            max((_nearest(start, ranks) for start in range(count)), key=lambda o: quality(o, ranks)), ranks
        )
    best = tuple(range(count))
    for rest in itertools.permutations(range(1, count)):
        order = (0, *rest)
        if rest[0] < rest[-1] and quality(order, ranks) > quality(best, ranks):  # a ring has two directions
            best = order
    return best


def _nearest(start: int, ranks: Ranks) -> tuple[int, ...]:
    order, left = [start], [i for i in range(len(ranks)) if i != start]
    while left:
        left.remove(nearest := max(left, key=lambda i: (ranks[order[-1]][i], -i)))
        order.append(nearest)
    begin = order.index(0)
    return (*order[begin:], *order[:begin])


def _improved(order: tuple[int, ...], ranks: Ranks) -> tuple[int, ...]:
    """Reverse parts until none makes the order better. Ends: the quality grows, and there are finitely many orders."""
    while True:
        better = max(
            (order[:i] + order[i:j][::-1] + order[j:] for i, j in itertools.combinations(range(1, len(order) + 1), 2)),
            key=lambda other: quality(other, ranks),
        )
        if quality(better, ranks) <= quality(order, ranks):
            return order
        order = better
