"""Large contents as chunks of a payload stream: many messages of one subject, written from threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from asyncrl.bus.answers import MESSAGE_ID, Ack
from asyncrl.bus.blobs import HEADER_ROOM
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_last
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
        self._check()
        self._room.acquire()
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
    record = await read_last(bus, topic, name)
    return record.data if record is not None else None


async def read_chunks(bus: Bus, topic: Topic[Any], name: str, take: Callable[[Record], None]) -> None:
    """Hand on all that is stored under a key, in its order.

    Raises:
        BusGone: the server fell silent.
        AsyncRLError, OSError: what `take` raised.
    """
    faults: list[AsyncRLError | OSError] = []

    def on_record(record: Record) -> None:
        if faults:
            return
        try:
            take(record)
        except (AsyncRLError, OSError) as error:  # for the caller
            faults.append(error)
        reader.more(1)

    reader = LogReader(bus, topic.stream, on_record, subjects=[topic.subject(bus.run, name)], paced=_READS)
    await reader.start()
    try:
        await reader.wait(lambda: bool(faults), _SILENT_S)
    finally:
        await reader.close()
    if faults:
        raise faults[0]
