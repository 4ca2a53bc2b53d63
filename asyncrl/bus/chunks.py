"""Large contents as chunks of a payload stream: many messages of one subject, written from threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from asyncrl.bus.acks import Ack
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone
from asyncrl.bus.log import LogReader, Record, last_sequence, read_last
from asyncrl.bus.publish import HEADER_ROOM, MESSAGE_ID
from asyncrl.errors import AsyncRLError
from topics.topic import Topic

_CHUNK_BYTES = 4 << 20  # larger ones are no quicker
_WRITES = 8  # under way
_READS = 16  # chunks asked for ahead
_SILENT_S = 30.0  # without a chunk, of a content that is there


class ChunkWriter:
    """Stores chunks of one topic.

    Raises, from both methods:
        BusError: a chunk was not stored within the deadline of publishes, as in a stream that stays full.
    """

    def __init__(self, bus: Bus, topic: Topic[Any]) -> None:
        """Make a writer for the threads of this event loop."""
        self.chunk_bytes = min(_CHUNK_BYTES, bus.max_payload - HEADER_ROOM)
        self._bus = bus
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(_WRITES)
        self._error: BaseException | None = None

    def put(self, name: str, headers: Mapping[str, str], body: bytes) -> None:
        """Store a chunk under a key; up to eight are under way when it returns."""
        self._room.acquire()
        self._check()
        message_id = ":".join([self._topic.name, name, *headers.values()])
        work = self._bus.store(self._topic.subject(self._bus.run, name), body, {MESSAGE_ID: message_id, **headers})
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(self._stored)

    def flush(self) -> None:
        """Return when all chunks are stored."""
        for _ in range(_WRITES):
            self._room.acquire()
        self._room.release(_WRITES)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stored(self, done: Future[Ack]) -> None:
        self._error = self._error or done.exception()
        self._room.release()


async def read_newest_chunk(bus: Bus, topic: Topic[Any], name: str) -> bytes | None:
    """Read what was stored last under a key; None where nothing is."""
    record = await read_last(bus, topic.stream, topic.subject(bus.run, name))
    return record.data if record is not None else None


async def read_chunks(bus: Bus, topic: Topic[Any], name: str, take: Callable[[Record], None]) -> None:
    """Hand on all that is stored under a key, in its order.

    Raises:
        BusGone: the server fell silent.
        AsyncRLError, OSError: what `take` raised.
    """
    end = await last_sequence(bus, topic.stream)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    news = asyncio.Event()

    def on_record(record: Record) -> None:
        news.set()
        if done.done():
            return
        try:
            take(record)
        except (AsyncRLError, OSError) as error:  # for the caller
            done.set_exception(error)
        reader.more(1)

    subject = topic.subject(bus.run, name)
    reader = LogReader(bus, topic.stream, on_record, subjects=[subject], paced=_READS)
    await reader.start()
    caught_up = asyncio.create_task(reader.caught_up.wait())
    try:
        while not (done.done() or caught_up.done()):
            news.clear()
            waiting = asyncio.create_task(news.wait())
            await asyncio.wait({waiting, caught_up}, timeout=_SILENT_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not (news.is_set() or caught_up.done()):
                raise BusGone(
                    f"{subject}: no chunk within {_SILENT_S:.0f} s, {end - reader.last} messages before the end"
                )
        if done.done():
            done.result()
    finally:
        caught_up.cancel()
        await reader.close()
