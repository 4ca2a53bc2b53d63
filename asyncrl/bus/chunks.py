"""Large contents as chunks of a payload stream: many messages of one subject, written from threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from asyncrl.background import first_of
from asyncrl.bus.acks import MESSAGE_ID, Ack
from asyncrl.bus.blobs import HEADER_ROOM
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_last
from topics.topic import Topic

_CHUNK_BYTES = 4 << 20  # larger ones are no quicker
_WRITES = 8  # unacknowledged publishes
_READS = 16  # chunks asked for ahead
_SILENT_S = 30.0  # without a chunk, of a content that is there


class ChunkLog:
    """Chunks of one topic, stored from threads.

    Raises, from `put` and `flush`:
        BusError: a chunk was not stored within the deadline of publishes, as in a stream that stays full.
    """

    def __init__(self, bus: Bus, topic: Topic[Any]) -> None:
        """Make a log for the threads of this event loop."""
        self._bus = bus
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(_WRITES)
        self._error: BaseException | None = None

    @property
    def chunk_bytes(self) -> int:
        """The greatest size of a chunk."""
        return min(_CHUNK_BYTES, self._bus.max_payload - HEADER_ROOM)

    def put(self, name: str, headers: Mapping[str, str], body: bytes) -> None:
        """Store a chunk under a key; up to eight publishes are still unacknowledged when it returns."""
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

    async def newest(self, name: str) -> bytes | None:
        """Read the newest value of a key; None without a value."""
        record = await read_last(self._bus, self._topic, name)
        return record.data if record is not None else None

    async def read(self, name: str, take: Callable[[Mapping[str, str], bytes], None]) -> None:
        """Hand on headers and bodies of all that is stored under a key, in its order.

        Args:
            name: the key.
            take: called by a thread for one chunk after another while later chunks arrive; never called after this
                function has returned or raised.

        Raises:
            BusGone: the server fell silent.
            AsyncRLError, OSError: what `take` raised.
        """
        came = asyncio.Queue[Record]()

        async def take_each() -> None:
            while True:
                record = await came.get()
                taken = asyncio.create_task(asyncio.to_thread(take, record.headers, record.data))
                try:
                    await asyncio.shield(taken)
                finally:
                    await asyncio.wait({taken})  # a thread ends by itself alone
                reader.more(1)
                came.task_done()

        subjects = [self._topic.subject(self._bus.run, name)]
        reader = LogReader(self._bus, self._topic.stream, came.put_nowait, subjects=subjects, paced=_READS)
        await reader.start()
        taking = asyncio.create_task(take_each())
        try:
            await reader.wait(taking.done, _SILENT_S)
            await first_of(came.join(), taking)
            if taking.done():
                taking.result()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await reader.close()

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stored(self, done: Future[Ack]) -> None:
        self._error = self._error or done.exception()
        self._room.release()
