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
from collections.abc import Awaitable, Callable
from typing import Any

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.errors import AsyncRLError
from asyncrl.framing import read_within
from asyncrl.process import ChildProcess, python
from topics.actors import WORK_ISOLATED, Waiting, WorkIsolated
from topics.topic import ACTORS
from topics.trajectories import FailureReason
from topics.wire import WireError

_SUSPECTED = 3  # runs without progress after which work is done alone
_AT_ONCE = 4  # processes for work that is done alone
_START_S = 60.0  # half of the time for a process to load what its role needs
_LEAVE_S = 4.0  # for one that is asked to leave to store the progress of its work


class WorkFailed(AsyncRLError):
    """A piece of work of which nothing will come."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason


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

    async def _run(self, delivery: Delivery[Any]) -> str:
        """One run in a process of its own; returns how it ended that process, or nothing."""
        with delivery.waiting(Waiting("turn")):
            await self._places.acquire()
        process = None
        ours, theirs = socket.socketpair()
        try:
            with delivery.waiting(Waiting("isolated")), theirs:
                process = await self._start(delivery, theirs.fileno())
                theirs.close()
                reader, writer = await asyncio.open_connection(sock=ours)
                with contextlib.closing(writer):
                    return await self._follow(process, reader)
        except asyncio.CancelledError:
            if process is not None and delivery.verdict is None:
                delivery.verdict = False  # that process gives it back
            raise
        finally:
            self._places.release()
            if process is not None:
                await process.end(_LEAVE_S)
                process.kill_group()

    async def _start(self, delivery: Delivery[Any], socket_number: int) -> ChildProcess:
        context = self._context
        login = (context.role, context.actor_id, context.bus.run, str(context.credentials), context.bus.address.url)
        command = python("-m", "actors.runtime.isolated", *login, delivery.message.reply, str(socket_number))
        return await ChildProcess.start(command, own_session=True, inherits=(socket_number,))

    async def _follow(self, process: ChildProcess, reader: asyncio.StreamReader) -> str:
        """Wait until a process has ended, or sends no more heartbeats; returns how its work did that, or nothing."""
        begun, silence_s = False, self._context.config.supervision.silence_s
        while await read_within(reader, silence_s if begun else _START_S):
            begun = True
        over = reader.at_eof() or reader.exception() is not None or process.returncode is not None
        if not over:
            process.kill_group()
            return "no heartbeat" if begun else ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await process.wait()
        return f"exit code {process.returncode}" if begun and process.returncode else ""

    async def _deaths(self, place: str) -> WorkIsolated | None:
        """Return the record of its isolated deaths."""
        bus = self._context.bus
        newest = await read_last(bus, ACTORS, WORK_ISOLATED.subject(bus.run, place))
        with contextlib.suppress(WireError):  # an unreadable entry under its name is ignored
            return None if newest is None else await read(bus, WorkIsolated, newest)
        return None
