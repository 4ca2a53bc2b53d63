"""Collecting the state of a run at one moment: a few small reads, whatever its logs hold."""

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
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_last_of_each, read_newest, server_time_ns
from asyncrl.bus.provision import queue_states, stream_states
from asyncrl.process import state_of
from asyncrl.state.parts import Disk, StreamFill
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
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.groups import GROUP_DROPPED
from topics.stalls import STALL_ENDED, STALL_FOUND
from topics.topic import ACTORS, BATCHES, DEAD, ENGINES, FLEET, GRADES, STREAMS, TRAINING, VITALS, Stream, Topic
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GRADED
from topics.weights import TRAINING_FINISHED, WEIGHTS_PUBLISHED

LIMIT_S = 8.0  # every caller has an answer by then
_CONNECT_S = 3.0
_BACK = 64  # messages of the training log that are read: a few steps and what is published between them
_LETTERS = 5
_GROUPS = 16  # groups whose other members are looked up


async def look_from_outside(address: BusAddress, run: str, root: Path | None) -> RunState:
    """The state of a run, on a connection of its own; a server that cannot be asked is part of it.

    Args:
        root: the run's directory, where it is on this machine.
    """
    state = RunState(run)
    if root is not None:
        state.disks = [_disk(root)]
    try:
        async with asyncio.timeout(LIMIT_S):
            bus = await Bus.connect(address, run, name="doctor", deadline_s=_CONNECT_S, publish_deadline_s=_CONNECT_S)
            try:
                await look(bus, state)
            finally:
                await bus.close()
    except TimeoutError:
        state.unreachable = f"NATS at {address.url} did not answer everything within {LIMIT_S:.0f} s"
    except BusDenied as error:
        state.denied = str(error)
    except (BusError, nats.errors.Error) as error:
        state.unreachable = str(error) or type(error).__name__
    return state


async def look_from_inside(bus: Bus, root: Path) -> RunState:
    """The state of a run, as an actor of it collects it.

    Raises:
        BusError, TimeoutError: the server did not answer.
    """
    state = RunState(bus.run)
    state.disks = [_disk(root)]
    async with asyncio.timeout(LIMIT_S):
        await look(bus, state)
    return state


async def look(bus: Bus, state: RunState) -> None:
    """Fill it from the topics and the server's own counts.

    Raises:
        BusError: the server does not answer, or does not let us look.
    """
    state.now_ns = await count(bus, state, STREAMS)

    def listener(stream: Stream, *topics: Topic[Any]) -> Listener:
        subjects = [topic.pattern(bus.run) for topic in topics]
        return Listener(bus, stream, state.apply, _leave_out, subjects=subjects)

    await listener(ACTORS, ACTOR_STARTED, ACTOR_STOPPED, RUN_OPENED, STOP_REQUESTED).read()
    await listener(FLEET, FLEET_SCALED, STALL_FOUND, STALL_ENDED).read()
    await listener(ENGINES, ENGINE_READY, ENGINE_UPDATING, ENGINE_GONE).read(newest=True)
    await listener(TRAINING, WEIGHTS_PUBLISHED, TRAINING_FINISHED).read(newest=True)
    last = await read_last(bus, TRAINING, BATCH_TRAINED.pattern(bus.run))
    if last is not None:
        await listener(TRAINING, BATCH_TRAINED).read(after=max(0, last.sequence - _BACK))
    packed = await read_last(bus, BATCHES, BATCH_PACKED.pattern(bus.run))
    if packed is not None:
        state.apply(BATCH_PACKED, None, packed)
    await listener(BATCHES, GROUP_DROPPED).read(after=packed.sequence if packed is not None else 0)
    letters = await read_newest(bus, DEAD)
    if letters is not None:
        await listener(DEAD, DEAD_LETTER).read(after=max(0, letters.sequence - _LETTERS))
    await listener(VITALS, VITALS_TAKEN).read(newest=True)
    await _look_up_mates(bus, state)
    for actor in state.actors.values():
        if actor.live and actor.host == socket.gethostname():
            actor.process = state_of(actor.pid)


async def count(bus: Bus, state: RunState, streams: Sequence[Stream]) -> int:
    """Take in what no topic holds: the server's counts of queues and of some streams. Returns the server's clock, ns.

    Raises:
        BusError: the server does not answer, or does not let us look.
    """
    state.queues = await queue_states(bus)
    found = await stream_states(bus, streams)
    state.streams = {
        name: StreamFill(one["bytes"], one["max_bytes"], one["messages"], server_time_ns(one["last_ts"]))
        for name, one in found.items()
    }
    return max(server_time_ns(one["now"]) for one in found.values())


def _leave_out(_record: Record, _error: Exception) -> None:
    """Ignore an unreadable message: its consumers reject it."""


async def _look_up_mates(bus: Bus, state: RunState) -> None:
    """Find which members of long-held trajectories' groups have a grade or failed."""
    prompts = list(dict.fromkeys(work.id.rsplit("-", 1)[0] for _, work in state.held("rollout")))[:_GROUPS]
    names = [f"{prompt}-{member}" for prompt in prompts for member in range(state.config.rollout.group_size)]
    subjects = [topic.subject(bus.run, name) for name in names for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    if subjects:
        found = await read_last_of_each(bus, GRADES, subjects)
        state.ended = {record.subject.rsplit(".", 1)[1] for record in found}


def _disk(root: Path) -> Disk:
    usage = shutil.disk_usage(root)
    return Disk(str(root), usage.free, usage.total)
