"""Watching a run through its topics: logs, vital signs and the server's own counts, folded into a view."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusRefused
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_message
from asyncrl.bus.provision import NO_STREAM, queue_states, stream_states
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.view import FOLLOWED, Filled, RunView
from topics.actors import ACTOR_STOPPED
from topics.batches import BatchPacked
from topics.topic import ACTORS, BATCHES, STREAMS, VITALS, Retention, Topic
from topics.wire import WireError

_ASK_S = 1.0  # how often the server is asked for queues, streams and the newest batch
_PAYLOADS = [stream for stream in STREAMS if stream.keep is Retention.PAYLOAD]


class Watch:
    """Follows a run; `view` is what is known of it."""

    def __init__(self, bus: Bus, view: RunView) -> None:
        self.view = view
        self._bus = bus
        self._listeners = {}
        # Starts and ends first, so that vital signs find their actor.
        for stream in sorted(STREAMS, key=lambda stream: (stream is not ACTORS, stream is VITALS)):
            subjects = [topic.pattern(bus.run) for topic in FOLLOWED if topic.stream is stream]
            if subjects:
                self._listeners[stream.name] = Listener(bus, stream, self._take, self._refuse, subjects=subjects)
        self._batch = 0  # sequence of the batch whose figures the view has
        self._asking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Read everything published so far, then follow.

        Raises:
            BusError: the streams are not there, or may not be read.
        """
        for stream, listener in list(self._listeners.items()):
            try:
                await listener.start()
            except BusRefused as error:
                if stream != VITALS.name or error.code != NO_STREAM:
                    raise
                del self._listeners[stream]  # in memory: gone with the server of a run that is over
                continue
            await listener.caught_up()
        await self._count()
        self._asking = asyncio.create_task(self._ask())

    async def close(self) -> None:
        """Stop following."""
        if self._asking is not None:
            self._asking.cancel()
        for listener in self._listeners.values():
            await listener.close()

    async def wait_for_end(self) -> None:
        """Fold in what was published until the supervisor left, as far as it comes within two seconds."""
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(2):
                last = await read_last(self._bus, ACTORS, ACTOR_STOPPED.subject(self._bus.run, SUPERVISOR))
                if last is not None:
                    await self.until(lambda: self._listeners[ACTORS.name].last >= last.sequence)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that depends on the view alone."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    def _take(self, topic: Topic[Any], message: Any, record: Record) -> None:
        self._news.set()
        self.view.apply(topic, message, record)

    def _refuse(self, record: Record, error: Exception) -> None:
        self._news.set()
        self.view.dead.add(f"number {record.sequence} of {record.stream.name}: {error}")

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(_ASK_S)
            with contextlib.suppress(BusError):  # a server that is away is asked again
                await self._count()

    async def _count(self) -> None:
        self.view.queues = await queue_states(self._bus)
        states = await stream_states(self._bus, _PAYLOADS)
        self.view.streams = {name: Filled(state["bytes"], state["max_bytes"]) for name, state in states.items()}
        newest = self.view.trained
        if newest is not None and newest.batch_sequence != self._batch:
            self._batch, self.view.figures = newest.batch_sequence, await self._figures(newest.batch_sequence)

    async def _figures(self, sequence: int) -> dict[str, float]:
        """Figures of one batch, without reading the log of all; empty where it cannot be read."""
        record = await read_message(self._bus, BATCHES, sequence)
        try:
            return (await read(self._bus, BatchPacked, record)).figures if record is not None else {}
        except (WireError, BlobMissing):
            return {}
