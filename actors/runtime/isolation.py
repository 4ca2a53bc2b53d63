"""Isolation: tell work that kills its workers from work that was merely there when they died.

A worker that dies takes all it holds with it, and the next delivery of each looks the same. Work that was begun three
times and brought nothing is therefore done in a process of its own: only what ends that process, again and again, is
poison. The worker survives it, and no other work was in that process. When the worker itself is killed, the kernel ends
the process with it, and that death is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from actors.runtime.actor import Context
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.errors import AsyncRLError
from asyncrl.framing import pack, read_frames
from asyncrl.process import ChildProcess, python
from topics.actors import WORK_ISOLATED, HeldWork, Waiting, WorkIsolated
from topics.topic import ACTORS
from topics.trajectories import FailureReason
from topics.wire import WireError

if TYPE_CHECKING:
    from actors.runtime.worker import Delivery

_SUSPECTED = 3  # runs without progress after which work is done alone
_AT_ONCE = 4  # processes for work that is done alone
_START_S = 120.0  # for a process to load what its role needs
_LEAVE_S = 4.0  # for one that is asked to leave to store the progress of its work
_LAST_ERROR_S = 1.0  # for what it sent before its end: what it forked may keep the socket open
State: TypeAlias = Literal["ready", "begun", "alive", "over", "left"]  # left: for a reason that is not the work's


class WorkFailed(AsyncRLError):
    """A piece of work of which nothing will come."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason


class Handed(msgspec.Struct, array_like=True):
    """A piece of work, as the queue delivered it."""

    subject: str
    reply: str
    headers: dict[str, str]
    data: bytes


class WorkResult(msgspec.Struct, array_like=True):
    """A report of the process: at each change, and every second."""

    state: State
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
                python("-m", "actors.runtime.isolated", *words, str(theirs.fileno())),
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
        async for frame in read_frames(reader):
            self._results.put_nowait(msgspec.msgpack.decode(frame, type=WorkResult))


async def _nowhere() -> int:
    return 0


class Isolation:
    """The work of one worker that is done alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        most = context.config.workers.poison_after
        self._beside = min(_SUSPECTED, most)  # runs beside other work
        self._alone = max(1, most - self._beside)  # and alone, after which work is poison
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[IsolatedProcess] = []

    async def done_alone(
        self, delivery: Delivery[Any], fruitless: int, came_to: Callable[[], Awaitable[int]] = _nowhere
    ) -> bool:
        """Have suspect work done in a process of its own, again while it ends its process and is not yet poison.

        Args:
            fruitless: how often it was begun without progress.
            came_to: how far it has come: deaths at another place than this are past.

        Returns:
            Whether the work is over here; False where it may be done beside other work, or is isolated already.

        Raises:
            WorkFailed: it is poison.
        """
        if self._context.handed is not None or fruitless < self._beside:
            return False
        bus, record = self._context.bus, delivery.record
        place = f"{record.stream.name}-{record.sequence}"
        while True:
            at = await came_to()
            known = await self._deaths(place)
            tries = known.tries if known is not None and known.at == at else 0
            if known is not None and tries >= self._alone:
                poison = f"{self._beside} runs without progress, then {tries} alone that ended in {known.how}"
                await self._context.reject(record, f"poison: {poison}", poison=True)
                raise WorkFailed("poison", poison)
            self._context.count("isolated")
            how = await self._run(delivery)
            if not how:
                return True
            self._context.log.warning("work ended its process", work=place, how=how, tries=tries + 1)
            await publish(bus, WorkIsolated(place, self._context.role, delivery.at.deliveries, tries + 1, at, how))

    async def close(self) -> None:
        """End the processes that wait for work."""
        await asyncio.gather(*(process.end() for process in self._idle))

    async def _run(self, delivery: Delivery[Any]) -> str:
        """One run in a process of its own; returns how it ended that process, or nothing."""
        with delivery.waiting(Waiting("turn")):
            await self._places.acquire()
        process = None
        try:
            with delivery.waiting(Waiting("isolated")):
                process = await self._take_process()
                how = await process.do(delivery) if process is not None else ""
        except asyncio.CancelledError:
            if process is not None:
                await process.end()
                if delivery.verdict is None:
                    delivery.verdict = False  # that process gave it back
            raise
        finally:
            self._places.release()
        if process is not None and process.alive:
            self._idle.append(process)
        return how

    async def _take_process(self) -> IsolatedProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await process.end()
        return await IsolatedProcess.start(self._context)

    async def _deaths(self, place: str) -> WorkIsolated | None:
        """Return the record of its isolated deaths."""
        bus = self._context.bus
        newest = await read_last(bus, ACTORS, WORK_ISOLATED.subject(bus.run, place))
        with contextlib.suppress(WireError):  # an unreadable entry under its name is ignored
            return None if newest is None else await read(bus, WorkIsolated, newest)
        return None
