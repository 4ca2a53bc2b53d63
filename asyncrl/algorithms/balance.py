"""The work of rows, by which ranks are measured, and its division among them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class _Part(NamedTuple):
    """Some items on all ranks; those with the most uneven loads come first."""

    order: tuple[float, int]  # negative difference of the largest and the smallest load; the first item
    loads: tuple[float, ...]  # largest first
    items: tuple[tuple[int, ...], ...]  # of each load


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each item, every item once: the largest differencing method of Karmarkar and Karp (1982).

    Begin with a partition for each item alone. Then combine, again and again, the two whose loads differ most, the
    largest load of one with the smallest of the other. Ties fall by position, so the result is a pure function of the
    arguments, and all ranks compute the same.

    Args:
        costs: not negative.
        ranks: how many there are; 1 or more.
    """
    heap = [
        _Part((-cost, index), (cost, *[0.0] * (ranks - 1)), ((index,), *[()] * (ranks - 1)))
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, _combined(heapq.heappop(heap), heapq.heappop(heap)))
    found = [0] * len(costs)
    for part in heap:
        for rank, items in enumerate(part.items):
            for index in items:
                found[index] = rank
    return found


def _combined(one: _Part, other: _Part) -> _Part:
    loads = [first + second for first, second in zip(one.loads, reversed(other.loads), strict=True)]
    items = [first + second for first, second in zip(one.items, reversed(other.items), strict=True)]
    order = sorted(range(len(loads)), key=lambda rank: (-loads[rank], items[rank]))
    difference = loads[order[0]] - loads[order[-1]]
    least = min(one.order[1], other.order[1])
    return _Part((-difference, least), tuple(loads[rank] for rank in order), tuple(items[rank] for rank in order))


class Work(NamedTuple):
    """Floating-point operations of training a decoder-only transformer on a row of T tokens, forward and backward.

    Linear layers take 6 P T: a multiplication and an addition for each of P parameters and token forward, and twice
    that backward. Causal attention takes 6 L A T^2, with A = heads x size of a head: query times key and weights times
    values are 2 x 2 A T^2 in each of L layers, half of it masked, and twice that backward. So they are counted in
    Megatron-LM, arXiv 2104.04473, appendix, but for its recomputation and with causal attention at half.
    """

    parameters: int  # P: of the matrices that every token passes, the projection to the vocabulary among them
    attention: int  # L x A

    def of(self, tokens: int) -> float:
        """Operations of a row."""
        return self.of_rows([tokens])

    def of_rows(self, lengths: Sequence[int], shared: int = 0) -> float:
        """Operations of rows, whose first `shared` tokens are computed once."""
        repeated = len(lengths) - 1
        tokens = sum(lengths) - repeated * shared
        pairs = sum(length**2 for length in lengths) - repeated * shared**2
        return 6.0 * self.parameters * tokens + 6.0 * self.attention * pairs
