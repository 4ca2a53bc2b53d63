"""The protocol of sinks: a sink takes rows of metrics in their order, and continues from a stored position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

Row: TypeAlias = dict[str, Any]
"""One row of `metrics.jsonl`. Its `event` is `step`, `eval` or `weights`; rows of one event always have one order."""


class Position(msgspec.Struct):
    """How far a sink has got in the rows of a run."""

    rows: dict[str, int] = {}  # rows that it has stored, by their event
    bytes: int = 0  # size of its file; 0 for sinks that write no file


class MetricsSink(Protocol):
    """A tool that stores rows of metrics.

    Each row is stored once, although the process that calls a sink may be killed at any time. The caller stores the
    position after `sync`. At the next start `open` removes rows after that position, or counts them.
    """

    def open(self, position: Position) -> int:
        """Continue after a position.

        Returns:
            Number of rows after the position that the sink has stored already and does not remove.
        """

    def append(self, rows: Sequence[Row]) -> None:
        """Take rows."""

    def sync(self) -> int:
        """Store all rows that were taken; returns the size in bytes of the file, 0 without a file."""

    def close(self) -> None:
        """Release what the sink has opened; also a sink that failed is closed."""
