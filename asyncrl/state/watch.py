"""Watching a run through its topics: logs, vital signs and the server's own counts, folded into its state."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import nats.errors

from asyncrl.bus.address import BusAddress
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusError, BusRefused
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_last_of_each, read_message, server_time_ns
from asyncrl.bus.provision import NO_STREAM, queue_states, stream_states
from asyncrl.bus.publish import read
from asyncrl.config.tasks import largest_group
from asyncrl.process import state_of
from asyncrl.state.records import Disk, StreamFill
from asyncrl.state.run_state import RunState
from topics.actors import (
    ACTOR_LEAVING,
    ACTOR_STARTED,
    ACTOR_STOPPED,
    AUTOSCALE_FAILED,
    DEAD_LETTER,
    FLEET_SCALED,
    RUN_OPENED,
    STOP_REQUESTED,
    VITALS_TAKEN,
)
from topics.alerts import ALERT_ENDED, ALERT_RAISED, UNPAUSE_REQUESTED
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked
from topics.engines import ENGINE_ANNOUNCED, ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING, ENGINE_WITHDRAWN
from topics.evals import EVAL_SCORED
from topics.groups import GROUP_DROPPED
from topics.ids import prompt_of, trajectory_name
from topics.profiles import PROFILE_STORED
from topics.stages import STAGE_BEGAN
from topics.stalls import STALL_ENDED, STALL_FOUND
from topics.streams import ADMISSION_PAUSED, ADMISSION_RESUMED, STREAM_TRIMMED
from topics.table import BUILT_IN, Tables
from topics.topic import BATCHES, GRADES, VITALS, Retention, Stream, Topic
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GRADED
from topics.weights import (
    CHECKPOINT_SAVED,
    TRAINING_FINISHED,
    WEIGHTS_PUBLISHED,
    WEIGHTS_REFUSED,
    WEIGHTS_REJECTED,
    WEIGHTS_UNCHANGED,
)
from topics.wire import WireError

LIMIT_S = 8.0  # every caller of the doctor has an answer by then
_CONNECT_S = 3.0
_ASK_S = 1.0  # how often the server is asked for queues, streams and the newest batch
_GROUPS = 16  # groups whose other members are looked up

_Start: TypeAlias = Literal["all", "newest"] | int


class _Part(NamedTuple):
    """Topics of one log, and how much of them is read before they are followed."""

    topics: tuple[Topic[Any], ...]
    # "newest": of each subject; a number: this many messages of the log, back from the end of the first topic
    start: _Start = "all"
    brief: _Start = "all"  # the same for a diagnosis, which reads little of any log; 0: nothing


_PARTS = (  # starts and ends first, so that vital signs find their actor
    _Part(
        (
            ACTOR_STARTED,
            ACTOR_LEAVING,
            ACTOR_STOPPED,
            RUN_OPENED,
            STOP_REQUESTED,
            UNPAUSE_REQUESTED,
            PROFILE_STORED,
            ENGINE_ANNOUNCED,
            ENGINE_WITHDRAWN,
        )
    ),
    _Part(
        (
            FLEET_SCALED,
            AUTOSCALE_FAILED,
            STALL_FOUND,
            STALL_ENDED,
            ALERT_RAISED,
            ALERT_ENDED,
            ADMISSION_PAUSED,
            ADMISSION_RESUMED,
        )
    ),
    _Part((STREAM_TRIMMED,), brief=0),
    _Part((ENGINE_READY, ENGINE_UPDATING, WEIGHTS_REFUSED, ENGINE_GONE), "newest", "newest"),
    _Part((BATCH_TRAINED,), brief=64),  # a few steps, and the messages between them
    _Part(
        (WEIGHTS_PUBLISHED, WEIGHTS_UNCHANGED, WEIGHTS_REJECTED, CHECKPOINT_SAVED, TRAINING_FINISHED),
        "newest",
        "newest",
    ),
    _Part((BATCH_PACKED, GROUP_DROPPED), 1, 1),
    _Part((STAGE_BEGAN,)),
    _Part((EVAL_SCORED,), brief=0),
    _Part((TRAJECTORY_FAILED,), brief=0),
    _Part((DEAD_LETTER,), brief=5),
    _Part((VITALS_TAKEN,), "newest", "newest"),
)


class Watch:
    """Follows a run; `state` is its current state."""

    def __init__(self, bus: Bus, state: RunState) -> None:
        self.state = state
        state.tables = bus.tables
        self._bus = bus
        self._listeners: dict[Topic[Any], Listener] = {}  # by the first topic that it reads
        self._batch = 0  # sequence of the batch whose figures the state has
        self._asking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def start(self, *, brief: bool = False) -> None:
        """Read all messages so far, then follow.

        Args:
            brief: read no more than a diagnosis needs.

        Raises:
            BusError: the streams are not there, or may not be read.
        """
        for part in _PARTS:
            await self._follow(part.topics, part.brief if brief else part.start)
        if not brief:
            await self._count()
            self._asking = asyncio.create_task(self._ask())

    async def examine(self) -> None:
        """Take in what only a diagnosis needs: all streams, processes of this machine, ends of long-held groups.

        Raises:
            BusError: the server does not answer, or does not let us look.
        """
        state = self.state
        state.now_ns = await self._count_messages(self._bus.tables.streams)
        prompts = list(dict.fromkeys(prompt_of(work.id) for _, work in state.held("rollout")))[:_GROUPS]
        names = [trajectory_name(prompt, member) for prompt in prompts for member in range(largest_group(state.config))]
        claims = [
            topic.subject(self._bus.run, name) for name in names for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)
        ]
        found = await read_last_of_each(self._bus, GRADES, claims) if claims else []
        state.ended = {record.key for record in found}
        for actor in state.actors.values():
            actor.process = state_of(actor.pid) if actor.live and actor.host == socket.gethostname() else ""

    async def close(self) -> None:
        """Stop following."""
        if self._asking is not None:
            self._asking.cancel()
        for listener in self._listeners.values():
            await listener.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that depends on the state alone."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    async def _follow(self, topics: Sequence[Topic[Any]], start: _Start) -> None:
        if start == 0:
            return
        run, stream = self._bus.run, topics[0].stream
        packed = BATCH_PACKED.subject(run)
        after = 0
        if isinstance(start, int):
            last = await read_last(self._bus, topics[0])
            after = max(0, last.sequence - start) if last is not None else 0
        listener = Listener(
            self._bus,
            stream,
            self._take,
            self._refuse,
            subjects=[topic.pattern(run) for topic in topics],
            unread=lambda record: record.subject == packed,
            newest=start == "newest",
        )
        try:
            await listener.start(after)
        except BusRefused as error:
            if stream is VITALS and error.code == NO_STREAM:
                return  # in memory: gone with the server of a run that is over
            raise
        self._listeners[topics[0]] = listener
        await listener.caught_up()

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
        await self._count_messages([one for one in self._bus.tables.streams if one.keep is Retention.PAYLOAD])
        newest = self.state.newest
        if newest is not None and newest.batch_sequence != self._batch:
            self._batch, self.state.figures = newest.batch_sequence, await self._figures(newest.batch_sequence)

    async def _count_messages(self, streams: Sequence[Stream]) -> int:
        """Take in the server's counts of queues and of some streams. Returns the server's clock, ns."""
        self.state.queues = await queue_states(self._bus)
        found = await stream_states(self._bus, streams)
        self.state.streams |= {
            name: StreamFill(one["bytes"], one["max_bytes"], one["messages"], server_time_ns(one["last_ts"]))
            for name, one in found.items()
        }
        return max(server_time_ns(one["now"]) for one in found.values())

    async def _figures(self, sequence: int) -> dict[str, float]:
        """Figures of one batch, without reading the whole log; empty if it cannot be read."""
        record = await read_message(self._bus, BATCHES, sequence)
        try:
            return (await read(self._bus, BatchPacked, record)).figures if record is not None else {}
        except (WireError, BlobMissing):
            return {}


async def read_state(bus: Bus, *, brief: bool = False) -> RunState:
    """Read a run's topics up to now.

    Args:
        brief: read, with the server's counts, what a diagnosis needs.
    """
    watch = Watch(bus, RunState(bus.run))
    try:
        await watch.start(brief=brief)
        if brief:
            await watch.examine()
    finally:
        await watch.close()
    return watch.state


async def collect_state(address: BusAddress, run: str, root: Path | None, tables: Tables = BUILT_IN) -> RunState:
    """The state of a run for a diagnosis, on a separate connection; an unreachable server is part of it.

    Args:
        root: the run's directory, if it is on this machine.
    """
    state = RunState(run)
    try:
        async with asyncio.timeout(LIMIT_S):
            bus = await Bus.connect(address, run, name="doctor", deadline_s=_CONNECT_S, publish_deadline_s=_CONNECT_S)
            bus.tables = tables
            try:
                state = await read_state(bus, brief=True)
            finally:
                await bus.close()
    except TimeoutError:
        state.unreachable = f"NATS at {address.url} did not answer everything within {LIMIT_S:.0f} s"
    except BusDenied as error:
        state.denied = str(error)
    except (BusError, nats.errors.Error) as error:
        state.unreachable = str(error) or type(error).__name__
    state.disks = [disk_of(root)] if root is not None else []
    return state


def disk_of(root: Path) -> Disk:
    """The file system of a run's directory."""
    usage = shutil.disk_usage(root)
    return Disk(str(root), usage.free, usage.total)
