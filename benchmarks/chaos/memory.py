"""Memory of a run's processes: growth between the beginning and the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable

import msgspec
import psutil

from asyncrl.run.fault_injection import Part

_EVERY_S = 2.0
_YOUNG_S = 15.0  # a younger process is still growing to its normal size
_SHARE = 0.25  # of the samples, at each end


class Growth(msgspec.Struct):
    """Resident memory of the processes of a role that are fully started: medians over a quarter of the time."""

    first_mb: float  # after the first quarter, in which caches fill
    last_mb: float
    most_mb: float


class MemoryMeter:
    """Samples the resident memory of every process of a run."""

    def __init__(self, parts: Callable[[], list[Part]]) -> None:
        """
        Args:
            parts: returns the living processes.
        """
        self._parts = parts
        self._samples: list[dict[str, float]] = []  # MB of the largest process of each role, one entry each time

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._samples.append(await asyncio.to_thread(self._take))
            await asyncio.sleep(_EVERY_S)  # no event announces that memory grows

    def growth(self) -> dict[str, Growth]:
        """Memory of each role in the second quarter of the samples and in the last."""
        quarter = max(1, int(len(self._samples) * _SHARE))
        early, late = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        found = {}
        for role in sorted({role for sample in self._samples for role in sample}):
            first, last = ([sample[role] for sample in part if role in sample] for part in (early, late))
            if first and last:
                most = max(sample.get(role, 0.0) for sample in self._samples)
                sizes = (statistics.median(first), statistics.median(last), most)
                found[role] = Growth(*(round(size, 1) for size in sizes))
        return found

    def _take(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self._parts():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if time.time() - part.process.create_time() > _YOUNG_S:
                    found[part.role] = max(found.get(part.role, 0.0), part.process.memory_info().rss / 1e6)
        return found
