"""Trace contexts of trajectories, which requests about them carry.

Ids follow from the names of run and trajectory, so that each process finds the same ones.
Source: W3C Trace Context, https://www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SAMPLE, GRADE = "sample", "grade"
"""Spans of a trajectory that have requests in them."""

_current: ContextVar[str] = ContextVar("traceparent", default="")


def trace_id(run: str, trajectory_id: str) -> bytes:
    """Return the 16 bytes of a trajectory's trace."""
    return hashlib.blake2b(f"{run}/{trajectory_id}".encode(), digest_size=16).digest()


def span_id(trace: bytes, span: str) -> bytes:
    """Return the 8 bytes of a span of a trace."""
    return hashlib.blake2b(span.encode(), digest_size=8, key=trace).digest()


def is_sampled(trace: bytes, share: float) -> bool:
    """Return whether a trace is among a share of all, as OpenTelemetry's sampler by trace id decides."""
    return int.from_bytes(trace[8:]) < share * 2**64


@contextmanager
def traced(run: str, trajectory_id: str, span: str, share: float) -> Iterator[None]:
    """Give requests within a block the trace context of a span, if its trajectory is sampled."""
    if not share or not is_sampled(trace := trace_id(run, trajectory_id), share):
        yield
        return
    token = _current.set(f"00-{trace.hex()}-{span_id(trace, span).hex()}-01")
    try:
        yield
    finally:
        _current.reset(token)


def traceparent() -> str:
    """Return the header `traceparent` of the trajectory that this task works on; "" if it is not sampled."""
    return _current.get()


def trace_headers(given: str) -> dict[str, str]:
    """Return the headers of a request with a trace context; none for ""."""
    return {"traceparent": given} if given else {}
