"""A process of a worker's own role that has one piece of work at a time, watched by the worker.

The effect of a piece of work on its process is certain there: the worker survives it, and no other work was in that
process. When the worker itself is killed, the kernel ends the process with it, and that death is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
from nats.aio.msg import Msg

from actors.runtime.actor import Context, Login, module_of, open_context
from actors.runtime.worker import Delivery
from asyncrl.bus.errors import BusError
from asyncrl.framing import Frames, pack
from asyncrl.process import ChildProcess, python
from asyncrl.telemetry.logs import open_log
from topics.actors import HeldWork

_START_S = 120.0  # for a process to load what its role needs
_LEAVE_S = 4.0  # for one that is asked to leave to store the progress of its work
_LAST_ERROR_S = 1.0  # for what it sent before its end: what it forked may keep the socket open
_HEARTBEAT_S = 1.0
_READ_BYTES = 1 << 18


class Handed(msgspec.Struct, array_like=True):
    """A piece of work, as the queue delivered it."""

    subject: str
    reply: str
    headers: dict[str, str]
    data: bytes


class WorkResult(msgspec.Struct, array_like=True):
    """A report of the process: at each change, and every second."""

    state: Literal["ready", "begun", "alive", "over", "left"]  # left: for a reason that is not the work's
    held: HeldWork | None = None


class IsolatedProcess:
    """The worker's side of it."""

    def __init__(
        self,
        process: ChildProcess,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        silence_s: float,
    ) -> None:
        self._process = process
        self._writer = streams[1]
        self._silence_s = silence_s
        self._results: asyncio.Queue[WorkResult | None] = asyncio.Queue()  # None: nothing more will come
        self._following = asyncio.create_task(self._follow(streams[0]))

    @classmethod
    async def start(cls, context: Context) -> IsolatedProcess | None:
        """Start one and wait until it is ready; None where it does not come so far."""
        ours, theirs = socket.socketpair()
        with theirs:
            words = (context.role, context.actor_id, context.bus.run, str(context.credentials), context.bus.address.url)
            process = await ChildProcess.start(
                python("-m", "actors.runtime.isolation", *words, str(theirs.fileno())),
                own_session=True,
                inherits=(theirs.fileno(),),
            )
        made = cls(process, await asyncio.open_connection(sock=ours), context.config.supervision.silence_s)
        ready = False
        try:
            ready = await made._next(_START_S) is not None
        finally:
            if not ready:
                await made.end()
                context.log.warning("isolated process did not start", code=process.returncode)
        return made if ready else None

    @property
    def alive(self) -> bool:
        """Return whether it can be given work."""
        return self._process.returncode is None

    async def do(self, delivery: Delivery[Any]) -> str:
        """Hand over a piece of work and wait until it is over; a caller that is cancelled meanwhile must `end` the
        process.

        Returns:
            How the process ended because of it; empty where it did not: the work is done, or given back.
        """
        message, begun = delivery.message, False
        self._writer.write(pack(Handed(message.subject, message.reply, message.headers or {}, message.data)))
        while (result := await self._next(self._silence_s)) is not None:
            begun = (begun or result.state == "begun") and result.state != "left"
            if result.state == "over":
                return ""
            if result.held is not None:
                delivery.waits_for, delivery.tokens = result.held.waiting, result.held.tokens
                delivery.advanced_at = time.monotonic() - result.held.quiet_s
        silent = self.alive
        await self.end(_LEAVE_S if not silent else 0.0)
        how = "no heartbeat" if silent else f"exit code {self._process.returncode}"
        return how if begun else ""

    async def end(self, within_s: float = _LEAVE_S) -> None:
        """Ask it to leave and let it give back what it holds; then end it, and whatever it has started."""
        if within_s:
            await self._process.end(within_s)
        self._process.kill_group()
        await self._process.wait()
        self._following.cancel()
        self._writer.close()

    async def _next(self, silence_s: float) -> WorkResult | None:
        """Return the next report; None where the process is silent or has ended."""
        for _ in range(2):  # once more: it may have been this process that stood still
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s):
                    return await self._results.get()
        return None

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Collect what it sends until it has ended."""
        reading = asyncio.create_task(self._read(reader))
        try:
            await self._process.wait()
            await asyncio.wait({reading}, timeout=_LAST_ERROR_S)
        finally:
            reading.cancel()
            self._results.put_nowait(None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                for frame in frames.feed(data):
                    self._results.put_nowait(msgspec.msgpack.decode(frame, type=WorkResult))


class Hands:
    """The process's side: where its work comes from, instead of a queue."""

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

    async def report(self, state: Literal["ready", "begun", "alive", "over", "left"]) -> None:
        """Send a state, and what the oldest work is at."""
        if self._writer is not None:
            self._writer.write(pack(WorkResult(state, next(iter(self._context.holding()), None))))
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        while data := await reader.read(_READ_BYTES):
            for frame in frames.feed(data):
                handed = msgspec.msgpack.decode(frame, type=Handed)
                await self.report("begun")
                bus = self._context.bus
                self._receive(Msg(bus.client, handed.subject, handed.reply, handed.data, handed.headers))

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
