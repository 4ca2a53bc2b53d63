"""A process of a worker's own role that has one piece of work at a time, watched by the worker.

What a piece of work does to its process is known for certain there: the worker survives it, and nothing else was in
that process. When the worker itself is killed, the kernel ends the process with it, and nobody counts that death.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
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

from actors.runtime.actor import Context, open_context
from actors.runtime.worker import Delivery
from asyncrl.bus.errors import BusError
from asyncrl.framing import Frames, pack
from asyncrl.run.placement import start_process
from asyncrl.telemetry.logs import open_log
from topics.actors import HeldWork

_START_S = 120.0  # for a process to load what its role needs
_LEAVE_S = 4.0  # for one that is asked to leave to store the progress of its work
_LAST_WORDS_S = 1.0  # for what it sent before its end: what it forked may keep the socket open
_BEAT_S = 1.0
_READ_BYTES = 1 << 18


class Handed(msgspec.Struct, array_like=True):
    """A piece of work, as the queue delivered it."""

    subject: str
    reply: str
    headers: dict[str, str]
    data: bytes


class Told(msgspec.Struct, array_like=True):
    """What the process sends: at each change, and every second."""

    state: Literal["ready", "begun", "lives", "over", "left"]  # left: for a reason that is not the work's
    held: HeldWork | None = None


class IsolatedProcess:
    """The worker's side of it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        silence_s: float,
    ) -> None:
        self._process = process
        self._writer = streams[1]
        self._silence_s = silence_s
        self._told: asyncio.Queue[Told | None] = asyncio.Queue()  # None: nothing more will come
        self._following = asyncio.create_task(self._follow(streams[0]))

    @classmethod
    async def start(cls, context: Context) -> IsolatedProcess | None:
        """Start one and wait until it is ready; None where it does not come so far."""
        ours, theirs = socket.socketpair()
        with theirs:
            files, actor_id, number = context.files, context.actor_id, theirs.fileno()
            words = ("actors.runtime.isolation", context.role, actor_id, str(files.root), str(number))
            process = await start_process(files, actor_id, *words, own_session=True, inherits=(number,))
        made = cls(process, await asyncio.open_connection(sock=ours), context.cast.keepers.lease_s)
        ready = False
        try:
            ready = await made._next(_START_S) is not None
        finally:
            if not ready:
                await made.end()
                context.log.warning("isolated process did not start", code=process.returncode)
        return made if ready else None

    @property
    def lives(self) -> bool:
        """Whether it can be given work."""
        return self._process.returncode is None

    async def do(self, delivery: Delivery[Any]) -> str:
        """Hand a piece of work over and wait until it is over; whoever is cancelled meanwhile must `end` the process.

        Returns:
            How the process ended of it; nothing where it did not: the work is done, or given back.
        """
        message, begun = delivery.message, False
        self._writer.write(pack(Handed(message.subject, message.reply, message.headers or {}, message.data)))
        while (told := await self._next(self._silence_s)) is not None:
            begun = (begun or told.state == "begun") and told.state != "left"
            if told.state == "over":
                return ""
            if told.held is not None:
                delivery.place, delivery.tokens = told.held.place, told.held.tokens
                delivery.advanced_at = time.monotonic() - told.held.quiet_s
        silent = self.lives
        await self.end(_LEAVE_S if not silent else 0.0)
        how = "no sign of life" if silent else f"exit code {self._process.returncode}"
        return how if begun else ""

    async def end(self, within_s: float = _LEAVE_S) -> None:
        """Ask it to leave and let it give back what it holds; then end it, and whatever it has started."""
        if within_s and self.lives:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._following.cancel()
        self._writer.close()

    async def _next(self, silence_s: float) -> Told | None:
        """What comes next; None where it is silent, or has ended."""
        for _ in range(2):  # once more: it may have been this process that stood still
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s):
                    return await self._told.get()
        return None

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Collect what it sends until it has ended."""
        reading = asyncio.create_task(self._read(reader))
        try:
            await self._process.wait()
            await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
        finally:
            reading.cancel()
            self._told.put_nowait(None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                for frame in frames.feed(data):
                    self._told.put_nowait(msgspec.msgpack.decode(frame, type=Told))


class Hands:
    """The process's side: where its work comes from, instead of a queue."""

    def __init__(self, context: Context, sock: socket.socket) -> None:
        self._context = context
        self._sock = sock
        self._receive: Callable[[Msg], None] = lambda _: None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, receive: Callable[[Msg], None]) -> Hands:
        """What a worker's loop takes for its queue."""
        self._receive = receive
        return self

    async def start(self, credit: int) -> None:
        """Tell that work may come, one piece after another whatever the credit."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._beat())]
        await self.tell("ready")

    def grant(self, count: int = 1) -> None:
        """The work is over, unless it was a fault that ended it."""
        if not self._context.faults:
            self._tasks.append(asyncio.create_task(self.tell("over")))

    async def close(self) -> None:
        """Take no more work."""
        if self._tasks:
            self._tasks[0].cancel()

    async def tell(self, state: Literal["ready", "begun", "lives", "over", "left"]) -> None:
        """Send a state, and what the oldest work is at."""
        if self._writer is not None:
            self._writer.write(pack(Told(state, next(iter(self._context.holding()), None))))
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        while data := await reader.read(_READ_BYTES):
            for frame in frames.feed(data):
                handed = msgspec.msgpack.decode(frame, type=Handed)
                await self.tell("begun")
                bus = self._context.bus
                self._receive(Msg(bus.client, handed.subject, handed.reply, handed.data, handed.headers))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await self.tell("lives")


async def play(role: str, actor_id: str, root: Path, sock: socket.socket) -> None:
    """Do what is handed over until asked to leave.

    Raises:
        Exception: what a piece of work raised in the program itself: it counts against the work.
    """
    context = await open_context(role, actor_id, root, open_log(actor=actor_id))
    hands = Hands(context, sock)
    context.handed = hands.open
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stop.set)
    try:
        await importlib.import_module(f"actors.{role}").main(context)
        if context.faults:
            raise context.faults[0]
    except BusError as error:
        context.log.error("isolated process left", reason=str(error))
    await hands.tell("left")
    await context.bus.close()


if __name__ == "__main__":
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(
            play(sys.argv[1], sys.argv[2], Path(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))
        )
    except SystemExit:  # what the work raised ends its process: no task of it may tell that it is over
        os._exit(1)
