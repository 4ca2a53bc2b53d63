"""Starts of processes on this machine, a few at a time."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

AT_ONCE = 2 * (os.cpu_count() or 1)  # what a process imports takes a core for a second


class Starts:
    """Limits how many processes begin together, so that their imports leave the others time on the cores."""

    def __init__(self, most: int = AT_ONCE) -> None:
        self._free = most
        self._again: deque[asyncio.Future[None]] = deque()  # processes that had worked: they go first
        self._new: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self, *, again: bool) -> AsyncIterator[None]:
        """Wait until a process may begin; it counts as beginning until this is left.

        Args:
            again: the process died, and others may wait for its work.
        """
        if self._free:
            self._free -= 1
        else:
            await self._given(self._again if again else self._new)
        try:
            yield
        finally:
            self._give()

    async def _given(self, waiting: deque[asyncio.Future[None]]) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it had just been given one
                self._give()
            raise

    def _give(self) -> None:
        """Pass a turn on to the next that waits."""
        while waiting := self._again or self._new:
            if not (one := waiting.popleft()).done():  # one that was cancelled is
                one.set_result(None)
                return
        self._free += 1
