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

import uvloop
from nats.aio.msg import Msg

from actors.runtime.actor import Context, Login, module_of, open_context
from actors.runtime.isolation import OVER
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_message
from asyncrl.bus.pull import position
from asyncrl.framing import write_heartbeats
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.output import print_lossy

_HEARTBEAT_S = 1.0
_IDLE_S = 60.0  # without work, after which the process leaves


class Handed:
    """The source of the work that a worker hands over, instead of a queue.

    The worker sends the reply subject of a delivery, a line each; heartbeats go back until that work is over.
    """

    def __init__(self, context: Context, sock: socket.socket) -> None:
        self._context = context
        self._sock = sock
        self._receive: Callable[[Msg], None] = lambda _: None
        self._over = asyncio.Event()

    def open(self, receive: Callable[[Msg], None]) -> Handed:
        """Return this object, which replaces the queue of a worker's loop."""
        self._receive = receive
        return self

    async def start(self, credit: int) -> None:
        """Begin to take the messages that are handed over."""
        self._context.tasks.start(self._take(*await asyncio.open_connection(sock=self._sock)))

    def grant(self, count: int = 1) -> None:
        """The work is over, unless it was a fault that ended it."""
        if not self._context.faults:
            self._over.set()

    async def close(self) -> None:
        """Take no more work: this process is about to leave."""

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bus = self._context.bus
        stream = bus.tables.queues[self._context.role].stream
        while reply := await _next(reader):
            record = await read_message(bus, stream, position(reply).stream_sequence)
            if record is not None:  # else its message is gone
                self._over.clear()
                heartbeats = asyncio.create_task(write_heartbeats(writer, b".", _HEARTBEAT_S))
                self._receive(Msg(bus.client, record.subject, reply, record.data, record.headers))
                await self._over.wait()
                heartbeats.cancel()
            writer.write(OVER)
        self._context.stop.set()


async def _next(reader: asyncio.StreamReader) -> str:
    """Return the next message handed over; "" if none arrives for `_IDLE_S`, or the worker has left."""
    with contextlib.suppress(OSError):  # a TimeoutError is one
        async with asyncio.timeout(_IDLE_S):
            return (await reader.readline()).decode().strip()
    return ""


async def run_actor(login: Login, sock: socket.socket) -> None:
    """Do the work that is handed over until there is no more or SIGTERM arrives; then return the work it holds.

    Raises:
        Exception: what work raised in the program itself: it counts against that work.
    """
    context = await open_context(login, open_log(actor=login.actor_id))
    context.handed = Handed(context, sock).open
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stop.set)
    try:
        await module_of(context).main(context)
        if context.faults:
            raise context.faults[0]
    except BusError as error:
        context.log.error("isolated process left", reason=str(error))
    await context.bus.close()


if __name__ == "__main__":
    print_lossy()
    loop = uvloop.new_event_loop()
    try:
        role, actor_id, run, credentials, address, number = sys.argv[1:]
        login = Login(role, actor_id, run, Path(credentials), address)
        loop.run_until_complete(run_actor(login, socket.socket(fileno=int(number))))
    except SystemExit:  # an exception of the work ends its process: no task of it may continue
        os._exit(1)
