"""Rows that begin alike, laid out so that each shared token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from topics.wire import Int32Array

_LEAST = 16  # tokens of a shared part: a shorter one is computed for each row


class PrefixTree(NamedTuple):
    """R rows as the nodes of a tree, in depth-first order: a sequence of T tokens."""

    places: list[npt.NDArray[np.int64]]  # of each row, [its length]: index into T of each of its tokens
    groups: tuple[tuple[int, int], ...]  # number and length of nodes that follow one another and see the same
    seen: tuple[tuple[int, ...], ...]  # of each group: numbers of the groups before its own tokens, first to last
    size: int  # T


class _Part(NamedTuple):
    """Rows of `_Builder.order` from `first` to before `end` that have their first `depth` tokens in common."""

    first: int
    end: int
    depth: int
    path: tuple[int, ...]  # groups of these tokens


class _Builder:
    """The tree while it grows."""

    def __init__(self, rows: Sequence[Int32Array]) -> None:
        self.rows, self.order = rows, by_prefix(rows)
        self.common = [0, *(common(rows[a], rows[b]) for a, b in pairwise(self.order))]
        self.places: list[list[npt.NDArray[np.int64]]] = [[] for _ in rows]
        self.groups: list[tuple[int, int]] = []
        self.seen: list[tuple[int, ...]] = []
        self.size = 0

    def grow(self, part: _Part) -> None:
        """Lay out all tokens of these rows from their depth on."""
        for first, end in self._alike(part):
            shared = min(self.common[first + 1 : end], default=len(self.rows[self.order[first]]))
            length = shared - part.depth
            inner = end - first > 1
            if length:
                self._append(range(first, end), length, part.path, alone=inner)
            if inner:
                path = (*part.path, len(self.groups) - 1)
                self.grow(_Part(first, end, shared, path))

    def _alike(self, part: _Part) -> Iterator[tuple[int, int]]:
        """Runs of these rows that have enough further tokens in common."""
        first = part.first
        for end in range(part.first + 1, part.end + 1):
            if end == part.end or self.common[end] < part.depth + _LEAST:
                yield first, end
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


def prefix_tree(rows: Sequence[Int32Array]) -> PrefixTree:
    """Lay out rows as a tree: parts of at least 16 tokens that rows share are there once.

    Args:
        rows: at least one, each with at least one token.
    """
    builder = _Builder(rows)
    builder.grow(_Part(0, len(rows), 0, ()))
    places = [np.concatenate(parts) for parts in builder.places]
    return PrefixTree(places, tuple(builder.groups), tuple(builder.seen), builder.size)


def by_prefix(rows: Sequence[Int32Array]) -> list[int]:
    """Numbers of the rows in an order in which those with a common prefix follow one another."""
    return sorted(range(len(rows)), key=lambda number: rows[number].tobytes())


def common(one: Int32Array, other: Int32Array) -> int:
    """Number of first tokens that two rows have in common."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


def sharing(rows: Sequence[Int32Array]) -> list[list[int]]:
    """Numbers of the rows in sets of those that share a prefix of at least 16 tokens."""
    order = by_prefix(rows)
    found = [[order[0]]] if order else []
    for one, other in pairwise(order):
        if common(rows[one], rows[other]) < _LEAST:
            found.append([])
        found[-1].append(other)
    return found
