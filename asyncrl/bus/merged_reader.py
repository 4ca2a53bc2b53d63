"""Reading logs to an end, several as one: their messages in the order in which the server stored them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.listen import Refuse, Take
from asyncrl.bus.log import LogReader, Record, read_last
from asyncrl.bus.publish import body_of, check_beside, read, unpack
from asyncrl.bus.sealing import open_body
from topics.topic import Stream, Topic
from topics.wire import Message

M = TypeVar("M", bound=Message)

_SILENT_S = 30.0
_UNREADABLE = (LookupError, ValueError, BlobMissing, SecretGone)


class Part(NamedTuple):
    """A log and its read position."""

    stream: Stream
    end: float = math.inf  # sequence of the last message that is read; else all that is there at the start
    subjects: Sequence[str] = ()  # none for all
    headers_only: bool = False
    unread: Collection[str] = ()  # subjects of which only headers are read
    after: int = 0  # reading starts after this sequence
    beside: bool = False  # blobs that messages name are checked too

    @property
    def ahead(self) -> int:
        """Messages that are held at most: a body may be as large as a message can be."""
        return 1024 if self.headers_only else 64


async def read_merged(bus: Bus, parts: Sequence[Part], take: Take, refuse: Refuse) -> None:
    """Hand all messages of some logs to `take`, the oldest of all first; invalid messages go to `refuse`.

    A LookupError or ValueError from `take` means that a message is invalid. One that is sealed under a data key that is
    gone is refused with a `SecretGone`. Records have the bodies that are stored.

    Raises:
        BusGone: the server sends nothing more.
    """
    sources = [_Source(bus, part) for part in parts if part.end > part.after]
    try:
        for source in sources:
            await source.start()
        live = [source for source in sources if await source.filled()]
        while live:
            earliest = min(live, key=_Source.next_ns)
            until_ns = min((source.next_ns() for source in live if source is not earliest), default=math.inf)
            while earliest.waiting and earliest.next_ns() <= until_ns:
                record = earliest.pop()
                try:
                    await _take(bus, earliest, record, take)
                except _UNREADABLE as error:
                    refuse(record, error)
            if not await earliest.filled():
                live.remove(earliest)
    finally:
        for source in sources:
            await source.close()


async def _take(bus: Bus, source: _Source, record: Record, take: Take) -> None:
    body = None if source.by_headers(record) else await body_of(bus, record)
    if source.beside:
        await check_beside(bus, record)
    topic = bus.tables.topic_of(record.subject)
    plain = body if body is None or topic is None else await open_body(bus, topic, record, body)
    take(*unpack(record, plain, bus.tables), record if body is None else record._replace(data=body))


async def read_log(
    bus: Bus, stream: Stream, fold: Fold, subjects: Sequence[str] = (), *, headers_only: bool = False
) -> None:
    """Fold in a log up to its current end.

    Args:
        subjects: that are read; none for all topics of it that `fold` reads.
        headers_only: whether no body is read; so it is, too, where `fold` needs none.

    Raises:
        BusGone: the server sends nothing more.
    """
    wanted = fold.inputs(bus.tables)[stream]
    subjects = subjects or [topic.pattern(bus.run) for topic in wanted.topics]
    part = Part(stream, subjects=subjects, headers_only=headers_only or wanted.headers_only)
    await read_merged(bus, [part], fold.apply, fold.refuse)


async def read_fold(bus: Bus, fold: Fold) -> None:
    """Fold in all logs that a fold reads, up to their current ends, the oldest message of all first.

    Raises:
        BusGone: the server sends nothing more.
    """
    parts = [
        Part(stream, subjects=[topic.pattern(bus.run) for topic in wanted.topics], headers_only=wanted.headers_only)
        for stream, wanted in fold.inputs(bus.tables).items()
    ]
    await read_merged(bus, parts, fold.apply, fold.refuse)


async def read_each(bus: Bus, topic: Topic[M], take: Callable[[M, Record], None]) -> None:
    """Hand every message of a topic to `take`, up to the current end of its log; unreadable ones are skipped.

    Raises:
        BusGone: the server sends nothing more.
    """
    part = Part(topic.stream, subjects=[topic.pattern(bus.run)])
    await read_merged(bus, [part], lambda _topic, message, record: take(message, record), lambda *_: None)


async def newest_message(bus: Bus, topic: Topic[M], key: str | None = None) -> tuple[M, Record] | None:
    """Return the newest message of a topic, or of one key, that can be read, with its record; None for none.

    Raises:
        BusGone: the server sends nothing more.
    """
    record = await read_last(bus, topic, key)
    if record is None:
        return None
    try:
        return await read(bus, topic.message, record), record
    except _UNREADABLE:
        found = deque[tuple[M, Record]](maxlen=1)
    subject = topic.pattern(bus.run) if key is None else topic.subject(bus.run, key)
    part = Part(topic.stream, subjects=[subject])
    await read_merged(bus, [part], lambda _topic, message, record: found.append((message, record)), lambda *_: None)
    return found[0] if found else None


class _Source(LogReader):
    """One log: read messages that were not handed over yet."""

    def __init__(self, bus: Bus, part: Part) -> None:
        super().__init__(
            bus,
            part.stream,
            self._add,
            after=part.after,
            subjects=part.subjects,
            headers_only=part.headers_only,
            paced=part.ahead,
        )
        self.waiting: deque[Record] = deque()
        self._part = part
        self.beside = part.beside
        self._over = False  # the end was read
        self._popped = 0

    def by_headers(self, record: Record) -> bool:
        """Return whether a record is read by its headers alone."""
        return self._part.headers_only or record.subject in self._part.unread

    def next_ns(self) -> int:
        """Server's clock at the oldest message that waits."""
        return self.waiting[0].time_ns

    def pop(self) -> Record:
        """The oldest message that waits; others may come in its place."""
        self._popped += 1
        if self._popped == self._part.ahead // 4:
            self._popped = 0
            self.more(self._part.ahead // 4)
        return self.waiting.popleft()

    async def filled(self) -> bool:
        """Wait for a message; False at the end.

        Raises:
            BusGone: none comes.
        """
        await self.wait(lambda: bool(self.waiting or self._over), _SILENT_S)
        return bool(self.waiting)

    def _add(self, record: Record) -> None:
        if record.sequence <= self._part.end:
            self.waiting.append(record)
        self._over |= record.sequence >= self._part.end
