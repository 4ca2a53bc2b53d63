"""Progress that other workers stored in their logs, read back by the key of the log.

Progress is stored outside of the trajectories' fences; `trajectory.progressed`, inside the fence, names the log that
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, read_next
from asyncrl.bus.publish import BlobMissing, read
from topics.topic import TRAJECTORIES
from topics.trajectories import PROGRESS_STORED, Holding, ProgressEntry, ProgressStored
from topics.wire import WireError

_LOGS_KEPT = 2  # of dead workers, whose trajectories arrive one after the other


class StoredEntry(NamedTuple):
    """An entry, and where it lies."""

    record: Record
    entry: ProgressEntry


class ProgressReader:
    """Reads other workers' logs, each once: all trajectories of a dead worker come at about the same time."""

    def __init__(self, bus: Bus, refuse: Callable[[Record, Exception], None]) -> None:
        """
        Args:
            refuse: is given each message that cannot be read.
        """
        self._bus = bus
        self._refuse = refuse
        self._logs: dict[str, _Log] = {}

    async def entries(self, trajectory_id: str, attempt: int, holding: Holding) -> list[StoredEntry]:
        """The entries that one delivery of a trajectory stored, oldest first.

        Args:
            holding: with `until` 0 for all that there are by now.
        """
        log = self._logs.pop(holding.log, None)
        if log is None or log.since > holding.since:
            log = _Log(holding.log, holding.since)
        self._logs[holding.log] = log  # the newest stands last
        for old in list(self._logs)[:-_LOGS_KEPT]:
            del self._logs[old]
        await log.read_on(self._bus, self._refuse)
        return [
            stored
            for stored in log.entries.get(trajectory_id, [])
            if stored.entry.attempt == attempt
            and stored.entry.delivery == holding.delivery
            and holding.since <= stored.record.sequence <= (holding.until or stored.record.sequence)
        ]


class _Log:
    """The entries read from one log."""

    def __init__(self, key: str, since: int) -> None:
        self.since = since
        self.entries: dict[str, list[StoredEntry]] = {}
        self._key = key
        self._next = since
        self._reading = asyncio.Lock()

    async def read_on(self, bus: Bus, refuse: Callable[[Record, Exception], None]) -> None:
        """Read up to its present end."""
        subject = PROGRESS_STORED.subject(bus.run, self._key)
        async with self._reading:
            while (record := await read_next(bus, TRAJECTORIES, subject, self._next)) is not None:
                self._next = record.sequence + 1
                try:
                    message: Any = await read(bus, ProgressStored, record)
                except (WireError, BlobMissing) as error:
                    refuse(record, error)
                    continue
                bare = record._replace(data=b"")
                for entry in message.entries:
                    self.entries.setdefault(entry.trajectory_id, []).append(StoredEntry(bare, entry))
