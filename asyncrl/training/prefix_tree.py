"""Rows that begin alike, laid out so that each shared token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[Any]
"""[T] or [T, B]: one item, or one row of items, identifies a token."""

_LEAST = 16  # tokens of a shared part: a shorter one is computed for each row


class PrefixTree(NamedTuple):
    """R rows as the nodes of a tree, in depth-first order: a sequence of T tokens."""

    places: list[npt.NDArray[np.int64]]  # of each row, [its length]: index into T of each of its tokens
    groups: tuple[tuple[int, int], ...]  # number and length of nodes that follow one another and see the same
    seen: tuple[tuple[int, ...], ...]  # of each group: numbers of the groups before its own tokens, first to last
    size: int  # T
    order: list[int]  # numbers of the rows; those with a common prefix follow one another
    joined: list[int]  # in this order: first tokens that a row shares with the previous one


class _Part(NamedTuple):
    """Rows of `_Builder.order` from `first` to before `end` that have their first `depth` tokens in common."""

    first: int
    end: int
    depth: int
    path: tuple[int, ...]  # groups of these tokens


class _Builder:
    """The tree while it grows."""

    def __init__(self, rows: Sequence[Tokens]) -> None:
        self.rows = rows
        self.order = sorted(range(len(rows)), key=lambda number: rows[number].tobytes())
        self.common = [0, *(common(rows[a], rows[b]) for a, b in pairwise(self.order))]
        self.joined = [0] * len(rows)
        self.places: list[list[npt.NDArray[np.int64]]] = [[] for _ in rows]
        self.groups: list[tuple[int, int]] = []
        self.seen: list[tuple[int, ...]] = []
        self.size = 0

    def grow(self) -> None:
        """Lay out all tokens."""
        waiting = list(self._branches(_Part(0, len(self.rows), 0, ())))[::-1]
        while waiting:
            part = waiting.pop()
            first, end = part.first, part.end
            shared = min(self.common[first + 1 : end], default=len(self.rows[self.order[first]]))
            inner = end - first > 1
            if length := shared - part.depth:
                self._append(range(first, end), length, part.path, alone=inner)
            if inner:
                path = (*part.path, len(self.groups) - 1)
                waiting += list(self._branches(_Part(first, end, shared, path)))[::-1]

    def _branches(self, part: _Part) -> Iterator[_Part]:
        """Runs of these rows that have enough further tokens in common."""
        first = part.first
        for end in range(part.first + 1, part.end + 1):
            if end == part.end or self.common[end] < part.depth + _LEAST:
                if first > part.first:
                    self.joined[first] = part.depth
                yield _Part(first, end, part.depth, part.path)
                first = end

    def _append(self, at: range, length: int, path: tuple[int, ...], *, alone: bool) -> None:
        """Add a node of these rows; leaves of one length and path are one group, a node with children is alone."""
        for place in at:
            self.places[self.order[place]].append(np.arange(self.size, self.size + length))
        self.size += length
        if not alone and self.groups and self.groups[-1][1] == length and self.seen[-1] == path:
            self.groups[-1] = (self.groups[-1][0] + 1, length)
        else:
            self.groups.append((1, length))
            self.seen.append(path)


def prefix_tree(rows: Sequence[Tokens]) -> PrefixTree:
    """Lay out rows as a tree: parts of at least 16 tokens that rows share are there once.

    Args:
        rows: at least one, each with at least one token.
    """
    builder = _Builder(rows)
    builder.grow()
    places = [np.concatenate(parts) for parts in builder.places]
    groups, seen = tuple(builder.groups), tuple(builder.seen)
    return PrefixTree(places, groups, seen, builder.size, builder.order, builder.joined)


def common(one: Tokens, other: Tokens) -> int:
    """Number of first tokens that two rows have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    apart = np.flatnonzero(differs.any(1) if differs.ndim > 1 else differs)
    return int(apart[0]) if len(apart) else length


def subtrees(tree: PrefixTree, budget: int) -> list[tuple[list[int], int]]:
    """Cut a tree into sets of rows that share a prefix, where the fewest tokens are repeated.

    Args:
        budget: largest number of tokens of a set, or of its longest row if that is longer.

    Returns:
        Numbers of the rows of each set, and the tokens of its tree, or a few more; each row once.
    """
    lengths = [len(tree.places[number]) for number in tree.order]
    ends = [0, *accumulate(length - joined for length, joined in zip(lengths, tree.joined, strict=True))]

    def size(first: int, end: int) -> int:
        return ends[end] - ends[first] + tree.joined[first]

    def fits(first: int, end: int) -> bool:
        return end - first == 1 or size(first, end) <= max(budget, *lengths[first:end])

    found, waiting = [], _cut_at(tree.joined, 0, 0, len(lengths))
    while waiting:
        first, end = waiting.pop()
        if fits(first, end):
            found.append((tree.order[first:end], size(first, end)))
            continue
        children = _cut_at(tree.joined, min(tree.joined[first + 1 : end]), first, end)
        joined = [children.pop(0)]
        for first, end in children:
            before = joined[-1][0]
            if fits(before, end):
                joined[-1] = (before, end)
            else:
                joined.append((first, end))
        waiting += joined
    return found


def _cut_at(joined: Sequence[int], depth: int, first: int, end: int) -> list[tuple[int, int]]:
    """Runs of rows that share more than `depth` tokens."""
    bounds = [first, *(place for place in range(first + 1, end) if joined[place] <= depth), end]
    return list(pairwise(bounds))
