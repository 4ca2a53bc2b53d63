"""Telling what kills its workers from what was merely there when they died: suspects work alone.

A worker that dies takes all it holds with it, and the next delivery of each looks the same. Work that came back three
times without progress is therefore done with nothing else beside it, and says so before it begins: only what was alone
with its worker's death, again and again, is poison.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from actors.actor import Context
from actors.worker import Delivery
from asyncrl.bus.log import read_last
from asyncrl.bus.talk import say, unpack
from topics.actors import WORK_ISOLATED, WorkIsolated
from topics.topic import ACTORS

TURN = "its turn"
_SUSPECT = 3  # deliveries without progress after which work is done alone


class Suspects:
    """Lets the work of one worker run side by side, or one piece of it alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._beside = 0  # pieces of work that run side by side
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()  # held by what runs alone

    @asynccontextmanager
    async def turn(
        self,
        delivery: Delivery[Any],
        trajectory_id: str,
        attempt: int,
        progressed: int = 1,
        prepared: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[str]:
        """The time in which a piece of work may run; yields why it is poison, or nothing.

        Args:
            progressed: the delivery in which it last came further.
            prepared: what work that runs alone waits for before it begins, and can be held guilty of nothing.
        """
        deliveries, most = delivery.at.deliveries, self._context.cast.rollout.poison_after
        suspect_after = min(_SUSPECT, most)
        if deliveries - progressed < suspect_after:
            async with self._side_by_side(delivery):
                yield ""
            return
        async with self._alone(delivery):
            tries = await self._tries(trajectory_id, attempt, progressed)
            if tries >= max(1, most - suspect_after):
                yield f"{deliveries - progressed} deliveries without progress, {tries} of them alone"
                return
            if prepared is not None:
                await prepared()
            role = self._context.role
            isolated = WorkIsolated(trajectory_id, role, attempt, deliveries, tries + 1)
            name = f"{trajectory_id}:{role}:{attempt}:{deliveries}:{tries}"
            await say(self._context.bus, WORK_ISOLATED, isolated, key=trajectory_id, id=name)
            self._context.count("isolated")
            yield ""

    @asynccontextmanager
    async def _side_by_side(self, delivery: Delivery[Any]) -> AsyncIterator[None]:
        if self._turn.locked():
            with delivery.waiting(TURN):
                await self._turn.acquire()
            self._turn.release()
        self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1
            self._idle.set()

    @asynccontextmanager
    async def _alone(self, delivery: Delivery[Any]) -> AsyncIterator[None]:
        with delivery.waiting(TURN):
            await self._turn.acquire()
        try:
            with delivery.waiting(TURN):
                while self._beside:
                    self._idle.clear()
                    await self._idle.wait()
            yield
        finally:
            self._turn.release()

    async def _tries(self, trajectory_id: str, attempt: int, progressed: int) -> int:
        """How often it has begun alone since it last came further."""
        newest = await read_last(self._context.bus, ACTORS, WORK_ISOLATED.subject(self._context.bus.run, trajectory_id))
        if newest is None:
            return 0
        _, isolated = unpack(newest, newest.data)
        mine = isolated.role == self._context.role and isolated.attempt == attempt
        known = mine and isolated.delivery > progressed
        return int(isolated.tries) if known else 0
