"""Isolation: distinguish work that kills its workers from work that they only held when they died.

A worker that dies takes all it holds with it, and the next delivery of each looks the same. Work that was begun three
times without progress therefore runs alone in a process next to the worker. Only work that ends that process, again and
again, is poison. The worker survives it, and no other work was in that process. When the worker itself is killed, the
kernel ends the process with it, and that death is not counted. A process that has done its work is used for the next
piece; the run whose end would make work poison is in a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.errors import AsyncRLError
from asyncrl.framing import read_within
from asyncrl.process import ChildProcess, python
from topics.actors import WORK_ISOLATED, Waiting, WorkIsolated
from topics.trajectories import FailureReason
from topics.wire import WireError

_SUSPECTED = 3  # runs without progress after which work is done alone
_AT_ONCE = 4  # processes for work that is done alone
_START_S = 60.0  # half of the time for a process to load what its role needs
_LEAVE_S = 4.0  # for one that is asked to leave to store the progress of its work
OVER = b"+"  # the report of a process that a piece of work is over; until then it sends other bytes


class WorkFailed(AsyncRLError):
    """A piece of work of which nothing will come."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason


class _Process(NamedTuple):
    """A process that does work alone, and the socket to it."""

    child: ChildProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> None:
        """Ask the process to leave and to return its work; then end the process and its children."""
        self.writer.close()
        await self.child.end(_LEAVE_S)


class Isolation:
    """The work of one worker that is done alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        most = context.config.workers.poison_after
        self._shared_runs = min(_SUSPECTED, most)  # runs together with other work
        self._alone = max(1, most - self._shared_runs)  # and alone, after which work is poison
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[_Process] = []

    async def done_alone(
        self, delivery: Delivery[Any], fruitless: int, progressed_at: Callable[[], Awaitable[int]] | None = None
    ) -> bool:
        """Run suspect work in a separate process, again while it ends its process and is not yet poison.

        Args:
            fruitless: how often it was begun without progress.
            progressed_at: sequence of its newest progress: deaths before it do not count.

        Returns:
            Whether the work is over here; False if it may run together with other work, or is isolated already.

        Raises:
            WorkFailed: it is poison.
        """
        if self._context.handed is not None or fruitless < self._shared_runs:
            return False
        bus, record = self._context.bus, delivery.record
        place = f"{record.stream.name}-{record.sequence}"
        while True:
            at = 0 if progressed_at is None else await progressed_at()
            known = await self._deaths(place)
            tries = known.tries if known is not None and known.at == at else 0
            if known is not None and tries >= self._alone:
                poison = f"{self._shared_runs} runs without progress, then {tries} alone that ended in {known.how}"
                await self._context.reject(record, f"poison: {poison}", poison=True)
                raise WorkFailed("poison", poison)
            self._context.count("isolated")
            how = await self._run(delivery, fresh=tries + 1 >= self._alone)
            if not how:
                return True
            self._context.log.warning("work ended its process", work=place, how=how, tries=tries + 1)
            await publish(bus, WorkIsolated(place, self._context.role, delivery.at.num_delivered, tries + 1, at, how))

    async def close(self) -> None:
        """End the processes that wait for work."""
        await asyncio.gather(*(process.end() for process in self._idle))

    async def _run(self, delivery: Delivery[Any], *, fresh: bool) -> str:
        """One run in a process, a `fresh` one or one that did other work; returns how it ended that, or nothing."""
        with delivery.waiting(Waiting("turn")):
            await self._places.acquire()
        process = None
        try:
            with delivery.waiting(Waiting("isolated")):
                process = await self._take(fresh=fresh)
                process.writer.write(f"{delivery.message.reply}\n".encode())
                how = await self._follow(process)
            if how is None:
                self._idle.append(process)
                process = None
            return how or ""
        except asyncio.CancelledError:
            if process is not None and delivery.verdict is None:
                delivery.verdict = False  # that process gives it back
            raise
        finally:
            self._places.release()
            if process is not None:
                await process.end()

    async def _take(self, *, fresh: bool) -> _Process:
        if self._idle:
            process = self._idle.pop()
            if not fresh and process.child.returncode is None:
                return process
            await process.end()
        context = self._context
        login = (context.role, context.actor_id, context.bus.run, str(context.credentials), context.bus.address.url)
        ours, theirs = socket.socketpair()
        with theirs:
            command = python("-m", "actors.runtime.isolated", *login, str(theirs.fileno()))
            child = await ChildProcess.start(command, apart=True, inherits=(theirs.fileno(),))
        return _Process(child, *await asyncio.open_connection(sock=ours))

    async def _follow(self, process: _Process) -> str | None:
        """Wait until a process reports that its work is over, has ended, or sends no more heartbeats.

        Returns:
            How the work ended the process; "" if the process ended for another reason; None if the process continues.
        """
        child, reader = process.child, process.reader
        begun, silence_s = False, self._context.config.supervision.silence_s
        while sent := await read_within(reader, silence_s if begun else _START_S):
            if sent.endswith(OVER):
                return None
            begun = True
        ended = reader.at_eof() or reader.exception() is not None or child.returncode is not None
        if not ended:
            child.kill()
            return "no heartbeat" if begun else ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await child.wait()
        return f"exit code {child.returncode}" if begun and child.returncode else ""

    async def _deaths(self, place: str) -> WorkIsolated | None:
        """Return the record of its isolated deaths."""
        bus = self._context.bus
        newest = await read_last(bus, WORK_ISOLATED, place)
        with contextlib.suppress(WireError):  # an unreadable entry under its name is ignored
            return None if newest is None else await read(bus, WorkIsolated, newest)
        return None
