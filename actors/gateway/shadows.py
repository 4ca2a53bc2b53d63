"""Shadow answers: replies of another version to a share of the turns; no client gets them, none is trained."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from actors.gateway.turn_store import TurnStore
from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.listen import Listener
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Decode
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.errors import VersionAbsent
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from topics.turns import TurnShadowed
from topics.wire import Int32Array

_AT_ONCE = 32  # of a gateway; more are left out


class Shadowed(NamedTuple):
    """A turn that has ended, as another version is to answer it."""

    turn: str
    prompt: Int32Array  # [P]
    sampling: SamplingParams
    secret: str
    trial: int  # sequence of the canary's message
    version: int  # of the canary


class Shadows:
    """Asks the engines of canaries alone, below all other requests, once the client has its reply."""

    def __init__(self, context: Context, served: ModelInfo, decode: Decode, facts: TurnStore) -> None:
        self._context, self._facts = context, facts
        self._fleet = open_fleet(context)
        self._generator = Generator(self._fleet, served, decode, counts={})
        self._deadline_s = context.config.gateway.deadline_s
        self._under_way = 0
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Follow the engines of canaries, if there are any."""
        if self._context.config.gateway.canary_engines:
            self._listener = await follow_fleet(self._context, self._fleet, "canary")

    def answer(self, turn: Shadowed | None) -> None:
        """Have a turn answered, and return at once; None is not answered."""
        if turn is None:
            return
        if self._under_way >= _AT_ONCE:
            self._context.count("shadows_left_out")
            return
        self._under_way += 1
        self._context.tasks.start(self._answer(turn))

    async def _answer(self, turn: Shadowed) -> None:
        wanted = Wanted(turn.version, exact=True, group=turn.turn)
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._generator.generate(turn.prompt, turn.sampling, wanted=wanted)
            stored = await self._facts.aside(TurnShadowed(turn.turn, turn.trial, answer.tokens, turn.secret))
        except (TimeoutError, EngineRefused, VersionAbsent) as error:
            self._context.log.warning("no shadow answer", turn=turn.turn, reason=str(error) or "it took too long")
            stored = False
        finally:
            self._under_way -= 1
        self._context.count("shadows" if stored else "shadows_left_out")

    async def close(self) -> None:
        """Follow the engines no more, and close the connections."""
        if self._listener is not None:
            await self._listener.close()
        await self._fleet.close()
