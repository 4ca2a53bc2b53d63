"""Watching a run through its topics: logs, vital signs and the server's own counts, folded into a view."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import LogReader, Record, read_last
from asyncrl.bus.provision import queue_states, stream_states
from asyncrl.bus.talk import BLOB, BlobMissing, body_of, unpack
from asyncrl.cli.find import WARDEN
from asyncrl.cli.view import HEARD, Filled, RunView
from topics.actors import ACTOR_STOPPED
from topics.topic import ACTORS, STREAMS, VITALS, Keep
from topics.wire import WireError

_ASK_S = 1.0  # how often the server is asked for its queues and streams
_PAYLOADS = [stream for stream in STREAMS if stream.keep is Keep.PAYLOAD]


class Watch:
    """Follows a run; `view` is what is known of it."""

    def __init__(self, bus: Bus, view: RunView) -> None:
        self.view = view
        self._bus = bus
        self._readers = {}
        # Lives first, so that vital signs find their actor.
        for stream in sorted(STREAMS, key=lambda stream: (stream is not ACTORS, stream is VITALS)):
            subjects = [topic.pattern(bus.run) for topic in HEARD if topic.stream is stream]
            if subjects:
                self._readers[stream.name] = LogReader(bus, stream, self._on_record, subjects=subjects)
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Read everything said so far, then follow.

        Raises:
            BusError: the streams are not there, or may not be read.
        """
        for reader in self._readers.values():
            await reader.start()
            async with asyncio.timeout(60):
                await reader.caught_up.wait()
        await self._count()
        self._spawn(self._ask())

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        for reader in self._readers.values():
            await reader.close()

    async def hear_the_end(self) -> None:
        """Fold in what was said until the warden left, as far as it comes within two seconds."""
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(2):
                last = await read_last(self._bus, ACTORS, ACTOR_STOPPED.subject(self._bus.run, WARDEN))
                if last is not None:
                    await self.until(lambda: self._readers[ACTORS.name].last >= last.sequence)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that depends on the view alone."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    def _on_record(self, record: Record) -> None:
        if BLOB in record.headers:
            self._spawn(self._fetch(record))
        else:
            self._fold_in(record, record.data)

    async def _fetch(self, record: Record) -> None:
        try:
            self._fold_in(record, await body_of(self._bus, record))
        except (WireError, BlobMissing, TimeoutError) as error:
            self._not_read(record, error)

    def _fold_in(self, record: Record, body: bytes) -> None:
        try:
            topic, message = unpack(record, body)
            self.view.apply(topic, message, record)
        except (WireError, LookupError, ValueError) as error:  # the latter two: values that are not what they must be
            self._not_read(record, error)
        self._news.set()

    def _not_read(self, record: Record, error: Exception) -> None:
        self.view.dead.add(f"number {record.sequence} of {record.stream.name}: {error}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(_ASK_S)
            with contextlib.suppress(BusError):  # a server that is away is asked again
                await self._count()

    async def _count(self) -> None:
        self.view.queues = await queue_states(self._bus)
        states = await stream_states(self._bus, _PAYLOADS)
        self.view.streams = {name: Filled(state["bytes"], state["max_bytes"]) for name, state in states.items()}
