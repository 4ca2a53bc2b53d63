"""Messages on their way to the learner's log, in their order, also while one of them waits for what it announces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from actors.runtime.keeper import Keeper
from topics.wire import Message


class Outbox:
    """Appends messages one after the other, beside the work that goes on."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._newest: asyncio.Task[None] | None = None

    def put(self, *messages: Message | Awaitable[Message]) -> None:
        """Append messages behind all that were put before; what is put after one that is still being made waits."""
        for message in messages:
            self._put(message)

    def _put(self, making: Message | Awaitable[Message]) -> None:
        self._newest = asyncio.create_task(self._store(self._newest, making))
        self._newest.add_done_callback(self._ended)

    def check(self) -> None:
        """Raise what ended an append, or the making of a message."""
        if self._newest is not None and self._newest.done():
            self._newest.result()

    async def stored(self) -> None:
        """Wait until everything put so far is on the log and read back."""
        if self._newest is not None:
            await asyncio.shield(self._newest)

    async def _store(self, before: asyncio.Task[None] | None, making: Message | Awaitable[Message]) -> None:
        try:
            message = making if isinstance(making, Message) else await making
        finally:
            if before is not None:
                await before
        await self._keeper.append_until_stored([message])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._keeper.wake()  # whoever waits for a batch looks
