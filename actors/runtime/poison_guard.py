"""Tell work that kills its workers from work that was merely there when they died.

A worker that dies takes all it holds with it, and the next delivery of each looks the same. Work that was begun three
times and brought nothing is therefore done in a process of its own: only what ends that process, again and again, is
poison.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from actors.runtime.actor import Context
from actors.runtime.isolation import IsolatedProcess
from actors.runtime.worker import Delivery
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from topics.actors import WORK_ISOLATED, Waiting, WorkIsolated
from topics.topic import ACTORS
from topics.wire import WireError

_SUSPECTED = 3  # runs without progress after which work is done alone
_AT_ONCE = 4  # processes for work that is done alone


async def _nowhere() -> int:
    return 0


class PoisonGuard:
    """The work of one worker that is done alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        most = context.config.workers.poison_after
        self._beside = min(_SUSPECTED, most)  # runs beside other work
        self._alone = max(1, most - self._beside)  # and alone, after which work is poison
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[IsolatedProcess] = []

    def doubts(self, fruitless: int) -> bool:
        """Return whether to isolate work that was begun so often without progress; False where it is isolated
        already."""
        return self._context.handed is None and fruitless >= self._beside

    async def alone(self, delivery: Delivery[Any], came_to: Callable[[], Awaitable[int]] = _nowhere) -> str:
        """Have a piece of work done in a process of its own, again while it ends its process and is not yet poison.

        Args:
            came_to: how far the work has come: deaths at another place than this are past.

        Returns:
            Why it is poison, which its message is rejected for; empty where the work is over here.
        """
        bus, record = self._context.bus, delivery.record
        place = f"{record.stream.name}-{record.sequence}"
        while True:
            at = await came_to()
            known = await self._deaths(place)
            tries = known.tries if known is not None and known.at == at else 0
            if known is not None and tries >= self._alone:
                poison = f"{self._beside} runs without progress, then {tries} alone that ended in {known.how}"
                await self._context.reject(record, f"poison: {poison}", poison=True)
                return poison
            self._context.count("isolated")
            how = await self._run(delivery)
            if not how:
                return ""
            self._context.log.warning("work ended its process", work=place, how=how, tries=tries + 1)
            death = WorkIsolated(place, self._context.role, delivery.at.deliveries, tries + 1, at, how)
            await publish(bus, death)

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
