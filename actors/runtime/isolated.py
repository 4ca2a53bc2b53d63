"""Process of isolated work, one piece at a time: `python -m actors.runtime.isolated ROLE ID RUN LOGIN URL SOCKET`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from nats.aio.msg import Msg

from actors.runtime.actor import Context, Login, module_of, open_context
from actors.runtime.isolation import Handed, State, WorkResult
from asyncrl.bus.errors import BusError
from asyncrl.framing import pack, read_frames
from asyncrl.telemetry.logs import open_log

_HEARTBEAT_S = 1.0


class Hands:
    """Where its work comes from, instead of a queue."""

    def __init__(self, context: Context, sock: socket.socket) -> None:
        self._context = context
        self._sock = sock
        self._receive: Callable[[Msg], None] = lambda _: None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, receive: Callable[[Msg], None]) -> Hands:
        """Return a stand-in for the queue of a worker's loop."""
        self._receive = receive
        return self

    async def start(self, credit: int) -> None:
        """Report that work may come, one piece after another whatever the credit."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._heartbeat())]
        await self.report("ready")

    def grant(self, count: int = 1) -> None:
        """The work is over, unless it was a fault that ended it."""
        if not self._context.faults:
            self._tasks.append(asyncio.create_task(self.report("over")))

    async def close(self) -> None:
        """Take no more work."""
        if self._tasks:
            self._tasks[0].cancel()

    async def report(self, state: State) -> None:
        """Send a state, and what the oldest work is at."""
        if self._writer is not None:
            self._writer.write(pack(WorkResult(state, next(iter(self._context.holding()), None))))
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for frame in read_frames(reader):
            handed = msgspec.msgpack.decode(frame, type=Handed)
            await self.report("begun")
            self._receive(Msg(self._context.bus.client, handed.subject, handed.reply, handed.data, handed.headers))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self.report("alive")


async def run_actor(login: Login, sock: socket.socket) -> None:
    """Do what is handed over until asked to leave.

    Raises:
        Exception: what a piece of work raised in the program itself: it counts against the work.
    """
    context = await open_context(login, open_log(actor=login.actor_id))
    hands = Hands(context, sock)
    context.handed = hands.open
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stop.set)
    try:
        await module_of(login.role).main(context)
        if context.faults:
            raise context.faults[0]
    except BusError as error:
        context.log.error("isolated process left", reason=str(error))
    await hands.report("left")
    await context.bus.close()


if __name__ == "__main__":
    loop = uvloop.new_event_loop()
    try:
        role, actor_id, run, credentials, address, number = sys.argv[1:]
        login = Login(role, actor_id, run, Path(credentials), address)
        loop.run_until_complete(run_actor(login, socket.socket(fileno=int(number))))
    except SystemExit:  # an exception of the work ends its process: no task of it may report that it is over
        os._exit(1)
