"""Taking the picture of a run: a few small reads, whatever its logs hold."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats.errors

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusError
from asyncrl.bus.log import LogReader, Record, read_last, read_last_of_each, server_time_ns
from asyncrl.bus.provision import queue_states, stream_states
from asyncrl.bus.talk import BlobMissing, body_of, unpack
from asyncrl.doctor.picture import Disk, Picture
from asyncrl.processes import state_of
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    DEAD_LETTER,
    FLEET_SCALED,
    RUN_OPENED,
    STOP_REQUESTED,
    VITALS_TAKEN,
)
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.groups import GROUP_DROPPED
from topics.stalls import STALL_ENDED, STALL_FOUND
from topics.topic import ACTORS, BATCHES, DEAD, ENGINES, FLEET, GRADES, TRAINING, VITALS, Stream, Topic
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GRADED
from topics.weights import TRAINING_FINISHED, WEIGHTS_PUBLISHED
from topics.wire import WireError

LIMIT_S = 8.0  # whoever asks has an answer by then
_CONNECT_S = 3.0
_BACK = 64  # messages of the training log that are read: a few steps and what is said between them
_LETTERS = 5
_GROUPS = 16  # groups whose other members are looked up


async def look_from_outside(address: BusAddress, run: str, root: Path | None) -> Picture:
    """The picture of a run on a connection of its own; a server that cannot be asked is part of it.

    Args:
        root: the run's directory, where it is on this machine.
    """
    picture = Picture(run)
    if root is not None:
        picture.disks = [_disk(root)]
    try:
        async with asyncio.timeout(LIMIT_S):
            bus = await Bus.connect(address, run, name="doctor", deadline_s=_CONNECT_S, publish_deadline_s=_CONNECT_S)
            try:
                await look(bus, picture)
            finally:
                await bus.close()
    except TimeoutError:
        picture.unreachable = f"NATS at {address.url} did not answer everything within {LIMIT_S:.0f} s"
    except BusDenied as error:
        picture.denied = str(error)
    except (BusError, nats.errors.Error) as error:
        picture.unreachable = str(error) or type(error).__name__
    return picture


async def look_from_inside(bus: Bus, root: Path) -> Picture:
    """The picture as an actor of the run takes it.

    Raises:
        BusError, TimeoutError: the server did not answer.
    """
    picture = Picture(bus.run, disks=[_disk(root)])
    async with asyncio.timeout(LIMIT_S):
        await look(bus, picture)
    return picture


async def look(bus: Bus, picture: Picture) -> None:
    """Fill a picture from the topics and the server's own counts.

    Raises:
        BusError: the server does not answer, or does not let us look.
    """
    picture.streams = await stream_states(bus)
    picture.queues = await queue_states(bus)
    picture.now_ns = max(server_time_ns(state["now"]) for state in picture.streams.values())
    for state in picture.streams.values():
        state["last_ns"] = server_time_ns(state["last_ts"])
    reading = _Reading(bus, picture)
    await reading.log(ACTORS, [ACTOR_STARTED, ACTOR_STOPPED, RUN_OPENED, STOP_REQUESTED])
    await reading.log(FLEET, [FLEET_SCALED, STALL_FOUND, STALL_ENDED])
    await reading.newest(ENGINES, [ENGINE_READY, ENGINE_UPDATING, ENGINE_GONE])
    await reading.newest(TRAINING, [WEIGHTS_PUBLISHED, TRAINING_FINISHED])
    last = await read_last(bus, TRAINING, BATCH_TRAINED.pattern(bus.run))
    if last is not None:
        await reading.log(TRAINING, [BATCH_TRAINED], after=max(0, last.sequence - _BACK))
    packed = await read_last(bus, BATCHES, BATCH_PACKED.pattern(bus.run))
    if packed is not None:
        picture.apply(BATCH_PACKED, None, packed)
    await reading.log(BATCHES, [GROUP_DROPPED], after=packed.sequence if packed is not None else 0)
    await reading.log(DEAD, [DEAD_LETTER], after=max(0, int(picture.streams[DEAD.name]["last_seq"]) - _LETTERS))
    await reading.newest(VITALS, [VITALS_TAKEN])
    await _look_up_mates(bus, picture)
    for actor in picture.actors.values():
        if actor.live and actor.host == socket.gethostname():
            actor.process = state_of(actor.pid)


class _Reading:
    """Reads messages into a picture; what cannot be read is left out, for whoever reads it first buries it."""

    def __init__(self, bus: Bus, picture: Picture) -> None:
        self._bus = bus
        self._picture = picture

    async def log(self, stream: Stream, topics: Sequence[Topic[Any]], after: int = 0) -> None:
        """Every message of some topics behind a sequence."""
        records: list[Record] = []
        subjects = [topic.pattern(self._bus.run) for topic in topics]
        reader = LogReader(self._bus, stream, records.append, after=after, subjects=subjects)
        await reader.start()
        try:
            await reader.caught_up.wait()
        finally:
            await reader.close()
        await self._take(records)

    async def newest(self, stream: Stream, topics: Sequence[Topic[Any]]) -> None:
        """The newest message of each subject of some topics."""
        subjects = [topic.pattern(self._bus.run) for topic in topics]
        await self._take(await read_last_of_each(self._bus, stream, subjects))

    async def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                topic, message = unpack(record, await body_of(self._bus, record))
                self._picture.apply(topic, message, record)
            except (WireError, BlobMissing, LookupError, ValueError):
                continue


async def _look_up_mates(bus: Bus, picture: Picture) -> None:
    """Find which members of long-held trajectories' groups have a grade or failed."""
    prompts = list(dict.fromkeys(work.id.rsplit("-", 1)[0] for _, work in picture.held("rollout")))[:_GROUPS]
    names = [f"{prompt}-{member}" for prompt in prompts for member in range(picture.cast.rollout.group_size)]
    subjects = [topic.subject(bus.run, name) for name in names for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    if subjects:
        found = await read_last_of_each(bus, GRADES, subjects)
        picture.ended = {record.subject.rsplit(".", 1)[1] for record in found}


def _disk(root: Path) -> Disk:
    usage = shutil.disk_usage(root)
    return Disk(str(root), usage.free, usage.total)
