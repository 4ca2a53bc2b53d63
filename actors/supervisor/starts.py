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
            again: it died, and others may wait for what it does.
        """
        self._free -= 1
        if self._free < 0:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._again if again else self._new).append(mine)
            await mine
        try:
            yield
        finally:
            self._free += 1
            while waiting := self._again or self._new:
                if not (one := waiting.popleft()).done():  # one that was cancelled is
                    one.set_result(None)
                    break
