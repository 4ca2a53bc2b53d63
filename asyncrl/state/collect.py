"""Taking the picture of a run: a few small reads, whatever its logs hold."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

import nats.errors

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusError
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_last_of_each, server_time_ns
from asyncrl.bus.provision import queue_states, stream_states
from asyncrl.process import state_of
from asyncrl.state.picture import Disk, Picture
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

LIMIT_S = 8.0  # every caller has an answer by then
_CONNECT_S = 3.0
_BACK = 64  # messages of the training log that are read: a few steps and what is published between them
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

    def listener(stream: Stream, *topics: Topic[Any]) -> Listener:
        subjects = [topic.pattern(bus.run) for topic in topics]
        return Listener(bus, stream, picture.apply, _leave_out, subjects=subjects)

    await listener(ACTORS, ACTOR_STARTED, ACTOR_STOPPED, RUN_OPENED, STOP_REQUESTED).read()
    await listener(FLEET, FLEET_SCALED, STALL_FOUND, STALL_ENDED).read()
    await listener(ENGINES, ENGINE_READY, ENGINE_UPDATING, ENGINE_GONE).read(newest=True)
    await listener(TRAINING, WEIGHTS_PUBLISHED, TRAINING_FINISHED).read(newest=True)
    last = await read_last(bus, TRAINING, BATCH_TRAINED.pattern(bus.run))
    if last is not None:
        await listener(TRAINING, BATCH_TRAINED).read(after=max(0, last.sequence - _BACK))
    packed = await read_last(bus, BATCHES, BATCH_PACKED.pattern(bus.run))
    if packed is not None:
        picture.apply(BATCH_PACKED, None, packed)
    await listener(BATCHES, GROUP_DROPPED).read(after=packed.sequence if packed is not None else 0)
    letters = int(picture.streams[DEAD.name]["last_seq"])
    await listener(DEAD, DEAD_LETTER).read(after=max(0, letters - _LETTERS))
    await listener(VITALS, VITALS_TAKEN).read(newest=True)
    await _look_up_mates(bus, picture)
    for actor in picture.actors.values():
        if actor.live and actor.host == socket.gethostname():
            actor.process = state_of(actor.pid)


def _leave_out(_record: Record, _error: Exception) -> None:
    """Ignore an unreadable message: its consumers reject it."""


async def _look_up_mates(bus: Bus, picture: Picture) -> None:
    """Find which members of long-held trajectories' groups have a grade or failed."""
    prompts = list(dict.fromkeys(work.id.rsplit("-", 1)[0] for _, work in picture.held("rollout")))[:_GROUPS]
    names = [f"{prompt}-{member}" for prompt in prompts for member in range(picture.config.rollout.group_size)]
    subjects = [topic.subject(bus.run, name) for name in names for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    if subjects:
        found = await read_last_of_each(bus, GRADES, subjects)
        picture.ended = {record.subject.rsplit(".", 1)[1] for record in found}


def _disk(root: Path) -> Disk:
    usage = shutil.disk_usage(root)
    return Disk(str(root), usage.free, usage.total)
