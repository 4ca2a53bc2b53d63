"""Watching a run through its topics: logs, vital signs and the server's own counts, folded into its state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusRefused
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_message
from asyncrl.bus.provision import NO_STREAM
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.collect import count
from asyncrl.state.run_state import RunState
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    DEAD_LETTER,
    FLEET_SCALED,
    RUN_OPENED,
    STOP_REQUESTED,
    VITALS_TAKEN,
)
from topics.batches import BATCH_TRAINED, BatchPacked
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.evals import EVAL_SCORED
from topics.stalls import STALL_ENDED, STALL_FOUND
from topics.streams import ADMISSION_PAUSED, ADMISSION_RESUMED, STREAM_TRIMMED
from topics.topic import ACTORS, BATCHES, STREAMS, VITALS, Retention, Topic
from topics.trajectories import TRAJECTORY_FAILED
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED
from topics.wire import WireError

_FOLLOWED = (
    BATCH_TRAINED,
    WEIGHTS_PUBLISHED,
    CHECKPOINT_SAVED,
    TRAINING_FINISHED,
    EVAL_SCORED,
    ENGINE_UPDATING,
    ENGINE_READY,
    ENGINE_GONE,
    TRAJECTORY_FAILED,
    DEAD_LETTER,
    RUN_OPENED,
    ACTOR_STARTED,
    ACTOR_STOPPED,
    STOP_REQUESTED,
    FLEET_SCALED,
    STALL_FOUND,
    STALL_ENDED,
    STREAM_TRIMMED,
    ADMISSION_PAUSED,
    ADMISSION_RESUMED,
    VITALS_TAKEN,
)
_ASK_S = 1.0  # how often the server is asked for queues, streams and the newest batch
_PAYLOADS = [stream for stream in STREAMS if stream.keep is Retention.PAYLOAD]


class Watch:
    """Follows a run; `state` is what is known of it."""

    def __init__(self, bus: Bus, state: RunState) -> None:
        self.state = state
        self._bus = bus
        self._listeners = {}
        # Starts and ends first, so that vital signs find their actor.
        for stream in sorted(STREAMS, key=lambda stream: (stream is not ACTORS, stream is VITALS)):
            subjects = [topic.pattern(bus.run) for topic in _FOLLOWED if topic.stream is stream]
            if subjects:
                self._listeners[stream.name] = Listener(bus, stream, self._take, self._refuse, subjects=subjects)
        self._batch = 0  # sequence of the batch whose figures the state has
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
        """Wait until something holds that depends on the state alone."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    def _take(self, topic: Topic[Any], message: Any, record: Record) -> None:
        self._news.set()
        self.state.apply(topic, message, record)

    def _refuse(self, record: Record, error: Exception) -> None:
        self._news.set()
        self.state.dead.add(f"number {record.sequence} of {record.stream.name}: {error}")

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(_ASK_S)
            with contextlib.suppress(BusError):  # a server that is away is asked again
                await self._count()

    async def _count(self) -> None:
        await count(self._bus, self.state, _PAYLOADS)
        newest = self.state.newest_batch
        if newest is not None and newest.batch_sequence != self._batch:
            self._batch, self.state.figures = newest.batch_sequence, await self._figures(newest.batch_sequence)

    async def _figures(self, sequence: int) -> dict[str, float]:
        """Figures of one batch, without reading the log of all; empty where it cannot be read."""
        record = await read_message(self._bus, BATCHES, sequence)
        try:
            return (await read(self._bus, BatchPacked, record)).figures if record is not None else {}
        except (WireError, BlobMissing):
            return {}


async def read_state(bus: Bus) -> RunState:
    """Read a run's topics up to now."""
    state = RunState(bus.run)
    watch = Watch(bus, state)
    await watch.start()
    await watch.close()
    return state
