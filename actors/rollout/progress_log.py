"""The progress log of a worker process: one message stores what is new of many trajectories, and is read back by key.

A message of its own for each trajectory costs a worker about ten times what an entry beside others does. So progress
is stored outside of the trajectories' fences; `trajectory.progressed`, inside the fence, names the log that counts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, Protocol

from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_next
from asyncrl.bus.publish import BlobMissing, publish, read
from asyncrl.crash import crash_point
from topics.topic import TRAJECTORIES
from topics.trajectories import PROGRESS_STORED, Holding, ProgressEntry, ProgressStored
from topics.wire import INLINE_BYTES, WireError

_ENTRY_BYTES = 512  # of an entry, besides its tokens and answers
_TOKEN_BYTES = 12
_LOGS_KEPT = 2  # of dead workers, whose trajectories arrive one after the other


class Storable(Protocol):
    """A trajectory's progress, as the log needs it."""

    def entry(self) -> ProgressEntry:
        """Return the new parts."""
        ...

    def stored(self, entry: ProgressEntry) -> None:
        """Note that this is stored."""
        ...


class ProgressLog:
    """Writes the entries of one worker process, as many in a message as are offered while the one before is stored."""

    def __init__(self, context: Context) -> None:
        self.key = f"{context.actor_id}-{secrets.token_hex(4)}"
        self._context = context
        self._offered: dict[Storable, list[asyncio.Future[None]]] = {}
        self._writing: asyncio.Task[None] | None = None

    def offer(self, progress: Storable) -> None:
        """Store what is new of a trajectory with the next message."""
        self._offered.setdefault(progress, [])
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    def withdraw(self, progress: Storable) -> None:
        """Discard the entry, unless a caller waits for it."""
        if not self._offered.get(progress, True):
            del self._offered[progress]

    async def store(self, progress: Storable) -> None:
        """Store what is new of a trajectory; returns when the server has it.

        Raises:
            BusError: it cannot be stored.
        """
        self.offer(progress)
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offered[progress].append(stored)
        await stored

    async def _write(self) -> None:
        try:
            while self._offered:
                await self._write_one()
        except Exception as error:  # this task is not awaited: its fault ends the actor
            self._context.fail(error)
        finally:
            self._writing = None

    async def _write_one(self) -> None:
        taken: dict[Storable, list[asyncio.Future[None]]] = {}
        entries: list[ProgressEntry] = []
        size = 0
        try:
            while self._offered and size < INLINE_BYTES // 2:
                progress = next(iter(self._offered))
                taken[progress] = self._offered.pop(progress)
                entries.append(progress.entry())
                size += _size_of(entries[-1])
            crash_point("progress.before")
            await publish(self._context.bus, ProgressStored(self.key, entries))
            crash_point("progress.stored")
            for progress, entry in zip(taken, entries, strict=True):
                progress.stored(entry)
        except BaseException as error:
            for future in chain(*taken.values()):
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else BusError("progress was not stored"))
            raise
        for future in chain(*taken.values()):
            if not future.done():
                future.set_result(None)


def _size_of(entry: ProgressEntry) -> int:
    answers = entry.journal.values()
    return _ENTRY_BYTES + sum(len(answer.tokens) * _TOKEN_BYTES + len(answer.result) for answer in answers)


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
