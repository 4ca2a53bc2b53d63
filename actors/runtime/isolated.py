"""Process of isolated work: `python -m actors.runtime.isolated ROLE ID RUN LOGIN URL REPLY SOCKET` does one piece."""

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
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_message
from asyncrl.bus.pull import position
from asyncrl.telemetry.logs import open_log
from topics.table import QUEUES

_HEARTBEAT_S = 1.0


class OneDelivery:
    """The source of one piece of work, instead of a queue. From its beginning on heartbeats go to the worker."""

    def __init__(self, context: Context, reply: str, sock: socket.socket) -> None:
        """
        Args:
            reply: subject of the delivery.
        """
        self._context = context
        self._reply = reply
        self._sock = sock
        self._receive: Callable[[Msg], None] = lambda _: None

    def open(self, receive: Callable[[Msg], None]) -> OneDelivery:
        """Return the stand-in for the queue of a worker's loop."""
        self._receive = receive
        return self

    async def start(self, credit: int) -> None:
        """Hand over the work, unless its message is gone."""
        bus, stream = self._context.bus, QUEUES[self._context.role].stream
        record = await read_message(bus, stream, position(self._reply).stream_sequence)
        if record is None:
            self._context.stop.set()
            return
        _, writer = await asyncio.open_connection(sock=self._sock)
        self._context.watch(asyncio.create_task(_send_heartbeats(writer)))
        self._receive(Msg(bus.client, record.subject, self._reply, record.data, record.headers))

    def grant(self, count: int = 1) -> None:
        """The work is over."""
        self._context.stop.set()

    async def close(self) -> None:
        """Take no more work."""


async def _send_heartbeats(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b".")
        with contextlib.suppress(OSError):
            await writer.drain()
        await asyncio.sleep(_HEARTBEAT_S)


async def run_actor(login: Login, reply: str, sock: socket.socket) -> None:
    """Do one piece of work, or give it back when asked to leave.

    Raises:
        Exception: what the work raised in the program itself: it counts against the work.
    """
    context = await open_context(login, open_log(actor=login.actor_id))
    context.handed = OneDelivery(context, reply, sock).open
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stop.set)
    try:
        await module_of(login.role).main(context)
        if context.faults:
            raise context.faults[0]
    except BusError as error:
        context.log.error("isolated process left", reason=str(error))
    await context.bus.close()


if __name__ == "__main__":
    loop = uvloop.new_event_loop()
    try:
        role, actor_id, run, credentials, address, reply, number = sys.argv[1:]
        login = Login(role, actor_id, run, Path(credentials), address)
        loop.run_until_complete(run_actor(login, reply, socket.socket(fileno=int(number))))
    except SystemExit:  # an exception of the work ends its process: no task of it may go on
        os._exit(1)
