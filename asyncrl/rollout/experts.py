"""Experts of the tokens of a trajectory: each token keeps the first row that was recorded for it, whichever call read
it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from asyncrl.engine.routing import rows_of
from topics.payload_refs import Experts
from topics.trajectories import Answer
from topics.wire import Int32Array, UInt8Array


def inherited(ids: Int32Array, calls: Iterable[tuple[str, Int32Array, Answer]]) -> Experts | None:
    """Return the reference to the existing rows of a call's tokens; None without rows.

    Args:
        ids: that are to be continued.
        calls: before it: path, its ids, and its answer.
    """
    best = None
    for path, given, answer in calls:
        if answer.routing is None:
            continue
        known = np.concatenate([given, answer.tokens])[: len(ids)]
        differ = np.flatnonzero(known != ids[: len(known)])
        first = min(answer.routing.end, int(differ[0]) if len(differ) else len(known))
        if best is None or first > best.first:
            best = Experts(answer.routing.width, follows=path, first=first)
    return best if best is not None and best.first else None


def rows_in(length: int, width: int, sampled: Sequence[tuple[int, str]], answers: Mapping[str, Answer]) -> UInt8Array:
    """Return the first row that was recorded for each token of a segment; those that were lost stay unknown.

    Args:
        length: of the segment.
        width: of a row.
        sampled: the calls in it by path, with the token at which each answer begins.
        answers: of all calls.

    Returns:
        [T, B], zeros where a row is not known.
    """
    rows, open_, placed = np.zeros((length, width), np.uint8), np.ones(length, np.bool_), set[str]()
    for start, path in sampled:
        for first, given in reversed(list(_chain(path, width, answers, placed))):
            taken = first + np.flatnonzero(open_[first : first + len(given)] & given.any(1))
            rows[taken] = given[taken - first]
            open_[taken] = False
        open_[max(start - 1, 0) : start - 1 + len(answers[path].tokens)] = False
    return rows


def _chain(path: str, width: int, answers: Mapping[str, Answer], placed: set[str]) -> Iterator[tuple[int, UInt8Array]]:
    """Rows of a call, then of its predecessors, as far as they share tokens; each with the index of its first token."""
    end = None
    while path and path not in placed:
        experts = answers[path].routing
        if experts is None or experts.width != width:
            return  # of engines that serve different models
        placed.add(path)
        yield experts.first, rows_of(experts)[: None if end is None else max(0, end - experts.first)]
        path, end = experts.follows, experts.first if end is None else min(end, experts.first)
