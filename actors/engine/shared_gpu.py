"""The GPU of an engine that time-shares GPU memory with the learner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from actors.runtime.actor import ActorDown, Context
from asyncrl.background import all_of, first_of
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.publish import publish
from asyncrl.crash import crash_point
from asyncrl.engine.control import EngineControl
from asyncrl.engine.starting import EngineFailed
from topics.gpu_handoff import CARD_REQUESTED, CARD_RETURNED, CardLeft, CardRequested, CardReturned, CardTaken
from topics.topic import TRAINING, Topic


class SharedGpu:
    """Follows the learner's turns, and takes and leaves the GPU for one engine.

    The GPU memory of a predecessor process is freed when it ends: this process takes or leaves the GPU again.
    """

    def __init__(self, context: Context, news: asyncio.Event) -> None:
        self._context = context
        self._news = news  # set when the learner asks for the GPU or returns it
        self._asked = self._returned = 0  # newest turn that was asked for, and that was returned
        self._held = False
        self._listener = context.listen(TRAINING, self._on_turn, [CARD_REQUESTED, CARD_RETURNED])

    @property
    def wanted(self) -> bool:
        """Return whether the learner has the GPU, or asks for it."""
        return self._asked > self._returned

    async def start(self) -> None:
        """Begin to follow the learner."""
        await self._listener.start(await self._look())

    async def close(self) -> None:
        """Leave the GPU, on which nothing is any more."""
        await self._listener.close()
        await self.leave()

    async def take(self) -> bool:
        """Return once this engine may use the GPU; False if the actor shall stop before."""
        left = False
        while not self._context.stop.is_set():
            self._news.clear()
            if not self.wanted:
                await publish(self._context.bus, CardTaken(self._context.actor_id))
                crash_point("card.taken")
                left = False
                await self._look()  # a request that was stored before is seen now; a later one counts this taking
                if not self.wanted:
                    self._held = True
                    return True
            if not left:
                left = True
                await self.leave()
            await first_of(self._news.wait(), self._context.stop.wait())
        return False

    async def leave_for_learner(self, server: EngineControl, deadline_s: float) -> None:
        """Give the memory of a server back; its requests return with their partial tokens, and wait, as at an update.

        Raises:
            EngineFailed: the deadline passed.
            EngineError: the server does not do it.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await server.drain()
                crash_point("card.emptied")
                await server.release_memory()
        except TimeoutError:
            raise EngineFailed(
                f"the engine did not leave the GPU within engine.update_deadline_s = {deadline_s:g} s"
            ) from None
        await self.leave()

    async def resume(self, server: EngineControl, fetching: Coroutine[Any, Any, float]) -> None:
        """Let a server take its memory again, while the version that it will load is fetched: see `Fetcher.ahead`.

        Raises:
            EngineError: the server does not do it.
        """

        async def resumed() -> float:
            began = time.monotonic()
            await server.resume_memory()
            return time.monotonic() - began

        resume_s, fetch_s = await all_of(resumed(), fetching)
        self._context.log.info("GPU taken again", resume_s=round(resume_s, 4), fetch_s=round(fetch_s, 4))

    async def leave(self) -> None:
        """Publish that this engine has nothing on the GPU."""
        self._held = False
        await publish(self._context.bus, CardLeft(self._context.actor_id))
        crash_point("card.left")

    async def _look(self) -> int:
        """Read the newest turns; returns the sequence of the newest request."""
        bus, asked = self._context.bus, 0
        turns: tuple[Topic[Any], ...] = (CARD_REQUESTED, CARD_RETURNED)
        for topic in turns:
            newest = await newest_message(bus, topic)
            if newest is not None:
                message, record = newest
                self._on_turn(topic, message, record)
                asked = record.sequence if topic is CARD_REQUESTED else asked
        return asked

    def _on_turn(self, _topic: Topic[Any], message: CardRequested | CardReturned, _record: Record) -> None:
        if isinstance(message, CardReturned):
            self._returned = max(self._returned, message.turn)
        elif message.turn > self._asked:
            self._asked = message.turn
            if self._held and self._context.actor_id in message.without:
                words = "the learner waited too long for the GPU and continues without this engine: its server is ended"
                self._context.fail(ActorDown(words))
        self._news.set()
