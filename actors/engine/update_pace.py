"""The first version that an engine looks at, and the least time between two updates."""

from __future__ import annotations

import time

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import newest_message
from topics.weights import WEIGHTS_PUBLISHED


async def first_sequence(bus: Bus) -> int:
    """Return the sequence of the newest version, or of the full one that its chain of differences begins with."""
    newest = await newest_message(bus, WEIGHTS_PUBLISHED)
    return 1 if newest is None else newest[0].full or newest[1].sequence


class UpdatePace:
    """Keeps updates apart: of the versions that come meanwhile an engine takes the newest."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ended_at: float | None = None

    def updated(self) -> None:
        """An update has ended now."""
        self._ended_at = time.monotonic()

    def pause_s(self) -> float:
        """Return the seconds until the next update may begin; 0 if it may begin now."""
        if self._ended_at is None:
            return 0.0
        return max(0.0, self._ended_at + self._interval_s - time.monotonic())
