"""Messages of a topic of a run, live or over, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from asyncrl.api.requests import released
from asyncrl.background import first_of
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import LogReader, Record, read_newest
from asyncrl.bus.publish import read
from asyncrl.run.connect import FoundRun, is_over, opened, run_ended
from asyncrl.state.live_tap import no_topic
from topics.topic import Topic
from topics.wire import Message, WireError

_AHEAD = 64  # messages that wait to be taken
_SILENT_S = 30.0


class TopicMessages(AsyncIterator[Message]):
    """The messages of a topic in the order of its log, until the run has ended; unreadable ones are skipped.

    The log keeps what its reader has not taken, so a slow reader misses nothing. A task reads ahead; it ends with the
    iterator.
    """

    def __init__(self, found: FoundRun, name: str, *, from_start: bool) -> None:
        self._found, self._name, self._from_start = found, name, from_start
        self._queue = asyncio.Queue[Message](_AHEAD)
        self._reading: asyncio.Task[None] | None = None

    async def __anext__(self) -> Message:
        if self._reading is None:
            self._reading = asyncio.create_task(_read(self._found, self._name, self._from_start, self._queue))
        if self._queue.empty():
            getting = asyncio.create_task(self._queue.get())
            await first_of(getting, self._reading)
            if getting.done():
                return getting.result()
            getting.cancel()
        if self._queue.empty():
            self._reading.result()
            raise StopAsyncIteration
        return self._queue.get_nowait()

    def __del__(self) -> None:
        reading = self._reading
        if reading is not None and not reading.done() and not reading.get_loop().is_closed():
            reading.get_loop().call_soon_threadsafe(reading.cancel)


async def _read(found: FoundRun, name: str, from_start: bool, queue: asyncio.Queue[Message]) -> None:
    """Put messages into a queue until the run has ended.

    Raises:
        WrongUsage: the run has no such topic.
        RunNotFound: the run cannot be reached.
    """
    after, over = 0 if from_start else -1, False
    while not over:
        held = found.is_held
        async with opened(found, "topic") as bus:
            topic = bus.tables.by_name.get(name)
            if topic is None:
                raise no_topic(name, bus.tables)
            over = not held or await is_over(bus, for_good=True)
            if after < 0:
                newest = await read_newest(bus, topic.stream)
                after = newest.sequence if newest is not None else 0
            async with contextlib.aclosing(_records(bus, topic, after, follow=not over)) as records:
                async for record in records:
                    after = record.sequence
                    with contextlib.suppress(WireError, BlobMissing, SecretGone):
                        await queue.put(await read(bus, topic.message, record))
        if not over:
            await released(found)  # the last messages are read from the store of the run


async def _records(bus: Bus, topic: Topic[Any], after: int, *, follow: bool) -> AsyncGenerator[Record, None]:
    """Yield the records of a topic up to the end of its log, or, to follow, up to the end of the run."""
    waiting, news = deque[Record](), asyncio.Event()

    def take(record: Record) -> None:
        waiting.append(record)
        news.set()

    reader = LogReader(bus, topic.stream, take, after=after, subjects=[topic.pattern(bus.run)], paced=_AHEAD)
    ending = asyncio.create_task(run_ended(bus)) if follow else None
    try:
        await reader.start()
        while True:
            while waiting:
                yield waiting.popleft()
                reader.more(1)
            news.clear()
            if ending is None:
                await reader.wait(lambda: bool(waiting), _SILENT_S)
                if not waiting:
                    return
            elif ending.done():
                return
            else:
                await first_of(news.wait(), ending)
    finally:
        if ending is not None:
            ending.cancel()
        await reader.close()
