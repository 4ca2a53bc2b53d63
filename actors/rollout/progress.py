"""The progress of one trajectory on a rollout worker: stored in the worker's log, and found again by the next worker.

Progress is stored outside of the trajectories' fences. The first time, a message inside the trajectory's fence names
the log that counts. After that an entry costs little, because it shares a message with others: a trajectory that is due
takes along those that are nearly so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from actors.runtime.actor import Context
from actors.runtime.delivery import PUBLISHING, Delivery
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_next
from asyncrl.bus.progress import publish_progress, with_rows
from asyncrl.bus.publish import Fenced, attempt_of, read
from asyncrl.crash import crash_point
from asyncrl.rollout.journal import Journal
from topics.payload_refs import Holding
from topics.prompts import PromptIssued
from topics.topic import TRAJECTORIES
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    ProgressEntry,
    ProgressStored,
    TrajectoryProgressed,
)
from topics.wire import INLINE_BYTES, WireError

_ENTRY_BYTES = 512  # of an entry without its tokens and answers
_TOKEN_BYTES = 12
_COMPANY = 0.9  # of the limit that is not stored: such a trajectory shares the message of one that is due
_LOGS_KEPT = 2  # of dead workers, whose trajectories arrive one after the other


class Progress:
    """The answers that a rollout function got, and how much of them is stored.

    Raises, from every method that publishes:
        Fenced: another worker holds the trajectory; this one has lost it.
    """

    def __init__(
        self,
        context: Context,
        issued: PromptIssued,
        delivery: Delivery[PromptIssued],
        log: ProgressLog,
        reader: ProgressReader,
    ) -> None:
        self.journal = Journal()
        self.lineages: set[int] = set()  # of weights that sampled tokens
        self.fruitless = min(1, delivery.at.num_delivered - 1)  # runs before this one since it last came further
        self.inflight = 0  # tokens that the running requests may still bring
        self._context = context
        self._limit = context.config.rollout.progress_limit
        self._due_at = self._limit - self._limit // 32
        self._issued = issued
        self._delivery = delivery
        self._log = log
        self._reader = reader
        self._name = issued.trajectory_id
        self._before: list[Holding] = []  # the progress that this delivery continues
        self._is_held = False  # the fence names this worker's log
        self._is_stored = False  # and something is there
        self._stored_tokens = 0
        self._entries = 0  # stored, those that this delivery continues among them
        self._holding = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._is_offered = False  # to the log, which has not stored it yet
        self._over = False

    @property
    def progressed_at(self) -> int:
        """Sequence of the newest message with progress from before this delivery; 0 if there is none."""
        return self._before[-1].until if self._before else 0

    @property
    def is_in_vain(self) -> bool:
        """Return whether the fence names this run, and nothing that it stored."""
        return self._is_held and not self._is_stored

    @property
    def unsaved(self) -> int:
        """Sampled tokens that are lost if this process dies now."""
        return self._delivery.tokens - self._stored_tokens

    @property
    def due(self) -> bool:
        """Return whether more tokens than the limit could be lost soon: tokens arrive until progress is stored."""
        if self._delivery.tokens - self._stored_tokens < self._due_at:  # so it is after most events of a stream
            return False
        return self._can_exceed and not (self._over or self._is_offered)

    async def load_existing(self) -> bool:
        """Read the stored progress and resume from it; return True if nothing is left to do for this trajectory."""
        newest = await self._delivery.newest(TRAJECTORY_PROGRESSED)
        if newest is None:
            return False
        if (attempt := attempt_of(newest)) is None:
            self._pass_over(newest, "its header attempt is no number")
        elif attempt != self._issued.attempt:
            self._delivery.fence = newest.sequence
            return attempt > self._issued.attempt  # this attempt has ended, another was issued
        elif self._context.bus.tables.topic_of(newest.subject) is TRAJECTORY_GENERATED:
            return True
        else:
            await self._resume(newest)
        return False

    async def hold(self) -> None:
        """Have the fence name this worker: from here on nothing that another worker stores counts."""
        async with self._holding:
            if self._is_held:
                await self._delivery.check_fence(TRAJECTORY_PROGRESSED)
                return
            message = TrajectoryProgressed(
                trajectory_id=self._name,
                attempt=self._issued.attempt,
                delivery=self._delivery.at.num_delivered,
                log=self._log.key,
                offset=self._stored_tokens,
                before=self._before,
                fruitless=self.fruitless + 1,
            )
            await self._delivery.publish(message)
            self._is_held = True
            crash_point("progress.held")

    async def checkpoint(self) -> None:
        """Store the present journal; returns when the server has it."""
        await self.hold()
        with self._delivery.waiting(PUBLISHING):
            await self._log.store(self)

    def publish_with_others(self) -> None:
        """Store it with the next message of the log if it is due or nearly so; a lost fence ends the work here."""
        if self.unsaved < _COMPANY * self._limit or not self._can_exceed or self._over or self._is_offered:
            return
        self._is_offered = True
        if self._is_held and self._delivery.holds_fence:
            self._log.offer(self)
        else:
            self._background = asyncio.create_task(self.checkpoint())
            self._background.add_done_callback(self._kept)

    def entry(self) -> ProgressEntry:
        """Return the new entries, for the worker's log."""
        return ProgressEntry(
            trajectory_id=self._name,
            attempt=self._issued.attempt,
            delivery=self._delivery.at.num_delivered,
            offset=self.journal.tokens,
            journal=self.journal.news(),
            lineages=sorted(self.lineages),
            discarded=self._delivery.discarded,
            follows=self._entries,
        )

    def stored(self, entry: ProgressEntry) -> None:
        """Note that an entry is stored."""
        self._is_offered = False
        self.journal.published(entry.journal)
        self._stored_tokens, self._is_stored = entry.offset, True
        self._entries += 1
        self._context.count("progressed")
        self._delivery.advanced()

    async def finish(self) -> None:
        """Store no more: its result comes next inside the fence."""
        self.close()
        if self._background is not None:
            await asyncio.wait({self._background})

    def close(self) -> None:
        """Start no more messages unless asked to."""
        self._over = True
        self._log.withdraw(self)

    @property
    def _can_exceed(self) -> bool:
        """Return whether the running requests may still bring more tokens than the limit allows to lose."""
        return self.unsaved + self.inflight > self._limit

    def _kept(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Fenced):
            self._context.count("fenced")
        else:
            self._context.fail(error)
        self._delivery.end(done=False)

    async def _resume(self, newest: Record) -> None:
        """Continue from the stored progress, or from the start if it cannot be read."""
        try:
            progressed = await read(self._context.bus, TrajectoryProgressed, newest)
        except (WireError, BlobMissing) as error:
            self._pass_over(newest, str(error))
            return
        self._delivery.fence, self.fruitless = newest.sequence, progressed.fruitless
        last = Holding(progressed.log, progressed.delivery, newest.sequence, 0)
        for holding in [*progressed.before, last]:
            entries = await self._reader.entries(self._name, progressed.attempt, holding)
            used = self._replay(entries)
            if used:
                until = used[-1].record.sequence
                self._before.append(Holding(holding.log, holding.delivery, used[0].record.sequence, until))
                self.fruitless = 0 if holding is last else self.fruitless
            if len(used) < len(entries):
                break  # the entries that follow continue a lost one
        self._stored_tokens = self._delivery.tokens = self.journal.tokens
        if self._before:
            self._context.count("resumed_elsewhere")

    def _replay(self, entries: list[StoredEntry]) -> list[StoredEntry]:
        """Continue the journal; returns the entries up to the first that does not continue it."""
        used = []
        for stored in entries:
            try:
                if stored.entry.follows != self._entries:
                    raise WireError(
                        f"an entry follows {stored.entry.follows} others, of which {self._entries} are there"
                    )
                self.journal.extend(stored.entry.journal)
            except WireError as error:
                self._context.log.warning("progress is not continued", trajectory=self._name, reason=str(error))
                break
            self.lineages.update(stored.entry.lineages)
            self._delivery.discarded = stored.entry.discarded
            self._entries += 1
            used.append(stored)
        return used

    def _pass_over(self, newest: Record, reason: str) -> None:
        """Keep the last message inside the fence, which cannot be read, as a dead letter; continue after it."""
        self._context.reject_soon(newest, reason)
        self._delivery.fence = newest.sequence


class ProgressLog:
    """The progress log of one worker process: one message stores new entries of many trajectories.

    A separate message for each costs a worker about ten times as much as one more entry in a message. One message
    therefore has all entries that were offered while the message before was stored.
    """

    def __init__(self, context: Context) -> None:
        self.key = f"{context.actor_id}-{secrets.token_hex(4)}"
        self._context = context
        self._offered: dict[Progress, list[asyncio.Future[None]]] = {}
        self._writing: asyncio.Task[None] | None = None

    def offer(self, progress: Progress) -> None:
        """Store the new entries of a trajectory with the next message."""
        self._offered.setdefault(progress, [])
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    def withdraw(self, progress: Progress) -> None:
        """Discard the entry, unless a caller waits for it."""
        if not self._offered.get(progress, True):
            del self._offered[progress]

    async def store(self, progress: Progress) -> None:
        """Store the new entries of a trajectory; returns when the server has them.

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
        taken: dict[Progress, list[asyncio.Future[None]]] = {}
        entries: list[ProgressEntry] = []
        size = 0
        try:
            while self._offered and size < INLINE_BYTES // 2:
                progress = next(iter(self._offered))
                taken[progress] = self._offered.pop(progress)
                entries.append(progress.entry())
                size += _size_of(entries[-1])
            crash_point("progress.before")
            await publish_progress(self._context.bus, self.key, entries)
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
    further = sum(len(answer.result) + (len(answer.routing.rows) if answer.routing else 0) for answer in answers)
    return _ENTRY_BYTES + sum(len(answer.tokens) for answer in answers) * _TOKEN_BYTES + further


class StoredEntry(NamedTuple):
    """An entry and its record."""

    record: Record
    entry: ProgressEntry


class ProgressReader:
    """Reads other workers' logs, each once: all trajectories of a dead worker come at about the same time."""

    def __init__(self, bus: Bus, refuse: Callable[[Record, Exception], None]) -> None:
        self._bus = bus
        self._refuse = refuse  # is given each message that cannot be read
        self._logs: dict[str, _Log] = {}

    async def entries(self, trajectory_id: str, attempt: int, holding: Holding) -> list[StoredEntry]:
        """The entries that one delivery of a trajectory stored, oldest first.

        Args:
            holding: with `until` 0 for all that there are by now.
        """
        log = self._logs.pop(holding.log, None)
        if log is None or log.since > holding.since:
            log = _Log(holding.log, holding.since)
        self._logs[holding.log] = log  # the newest is last
        for old in list(self._logs)[:-_LOGS_KEPT]:
            del self._logs[old]
        await log.read_on(self._bus, self._refuse)
        found: list[StoredEntry] = []
        for record, entry in log.entries.get(trajectory_id, []):
            counts = holding.since <= record.sequence <= (holding.until or record.sequence)
            if not counts or (entry.attempt, entry.delivery) != (attempt, holding.delivery):
                continue
            try:
                found.append(StoredEntry(record, await with_rows(self._bus, record, entry)))
            except (WireError, BlobMissing) as error:
                self._refuse(record, error)  # entries after it do not continue the stored ones
        return found


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
                    message = await read(bus, ProgressStored, record)
                except (WireError, BlobMissing) as error:
                    refuse(record, error)
                    continue
                bare = record._replace(data=b"")
                for entry in message.entries:
                    self.entries.setdefault(entry.trajectory_id, []).append(StoredEntry(bare, entry))
