"""Requests of higher priority come first: in the queue, and in the rows of a full engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncrl.engine.embedded.request import Request


def enqueue(waiting: deque[Request], request: Request) -> None:
    """Put a request behind those of its priority; one that had a row before comes before all of its own."""
    if not waiting or (waiting[-1].priority >= request.priority and not request.retractions):
        waiting.append(request)
        return
    ahead = sum(
        other.priority > request.priority or (other.priority == request.priority and not request.retractions)
        for other in waiting
    )
    waiting.insert(ahead, request)


def to_retract(running: Sequence[Request], waiting: deque[Request], free: int) -> list[Request]:
    """Return the running requests that give their rows to waiting ones of higher priority.

    Of those with the lowest priority the ones with the fewest tokens go: they have the least to compute again.

    Args:
        free: rows that no request has.
    """
    if not waiting or waiting[0].priority <= min((one.priority for one in running), default=waiting[0].priority):
        return []
    urgent = [request.priority for request in waiting][free:]
    rows = sorted(running, key=lambda one: (one.priority, len(one.prompt) + len(one.tokens)))
    pairs = zip(rows, urgent, strict=False)  # the least of those that run, with the most urgent that waits
    return [row for row, priority in pairs if row.priority < priority]
