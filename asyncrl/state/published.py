"""The state of a run as its supervisor publishes it: `run.state` each second, and `run.history`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, server_time_ns
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.provision import NO_STREAM, stream_states
from topics.actors import RUN_OPENED
from topics.runs import RUN_HISTORY, RUN_STATE, RunMoment, RunStatus
from topics.topic import VITALS, Topic

_CURRENT_S = 5.0  # a supervisor that published nothing for longer is not there
_NEXT_S = 3.0  # for the next state


async def follow_status(bus: Bus, take: Callable[[RunStatus], None]) -> Listener:
    """Hand over each state that is published since the run was opened, until the listener is closed.

    Raises:
        BusError: the topics cannot be read.
    """
    opened = await read_last(bus, RUN_OPENED)
    opened_ns = opened.time_ns if opened is not None else 0

    def on_status(_topic: Topic[RunStatus], status: RunStatus, record: Record) -> None:
        if record.time_ns >= opened_ns:
            take(status)

    listener = Listener(bus, VITALS, on_status, lambda *_: None, subjects=[RUN_STATE.subject(bus.run)], newest=True)
    await listener.start()
    return listener


async def next_status(bus: Bus) -> RunStatus | None:
    """Return the next state that the supervisor of a run publishes; None if no supervisor publishes.

    Raises:
        BusError: the topics cannot be read.
    """
    newest = await read_last(bus, RUN_STATE)
    now_ns = server_time_ns((await stream_states(bus, [VITALS]))["VITALS"]["now"])
    if newest is None or now_ns - newest.time_ns > _CURRENT_S * 1e9:
        return None
    found: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
    seen: list[RunStatus] = []

    def take(status: RunStatus) -> None:
        seen.append(status)
        if len(seen) > 1 and not found.done():  # the first was published before
            found.set_result(status)

    listener = await follow_status(bus, take)
    try:
        return await asyncio.wait_for(found, _NEXT_S)
    except TimeoutError:
        return None
    finally:
        await listener.close()


async def read_moments(bus: Bus) -> list[RunMoment]:
    """Read the course of a run: by the second for the last ten minutes, by ten seconds for six hours, else by minutes.

    Raises:
        BusError: the topics cannot be read.
    """
    found: dict[float, RunMoment] = {}
    try:
        await read_each(bus, RUN_HISTORY, lambda moment, _record: found.__setitem__(moment.at_s, moment))
    except BusRefused as error:
        if error.code != NO_STREAM:  # a run of an older version has no history
            raise
    return [found[at_s] for at_s in sorted(found)]
