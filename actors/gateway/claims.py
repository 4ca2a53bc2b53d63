"""Claims of requests that go on with earlier ones: of several gateways that are asked in one moment one answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from actors.gateway.facts import Facts
from actors.gateway.turn import Turn
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import TIME_TO_LIVE, Fenced, publish_if_latest, read
from asyncrl.live.apis.words import LiveError
from asyncrl.live.turn_log import UNDER_WAY, Asked, TurnLog
from topics.turns import TURN_CLAIMED, TurnClaimed

_LIMIT_S = 2.0  # for the server to answer; without it requests are answered as they come
_SPARE_S = 10.0  # between the place of a request and the begin of its turn

Make = Callable[[bool], list[Turn]]
"""Returns the turns of a request by what is known now; True: that go on with none."""


class Claims:
    """Claims idempotency keys, and cut turns that a request goes on with, before the begin of its turn is stored.

    A claim is appended behind the newest one that was there before the stored turns were read: where another gateway
    was faster, there is a newer one. It expires, so that a request whose gateway died between the two is free again.
    """

    def __init__(
        self, bus: Bus, log: TurnLog, catch_up: Callable[[], Awaitable[bool]], facts: Facts, *, hold_s: float
    ) -> None:
        """
        Args:
            catch_up: waits for what other gateways have stored; returns whether it is all there.
            facts: knows which of them live.
            hold_s: seconds that a request may wait between its claim and its begin.
        """
        self._bus = bus
        self._log = log
        self._catch_up = catch_up
        self._facts = facts
        self._lease = f"{math.ceil(hold_s + _SPARE_S)}s"

    async def turns(self, who: Sequence[Asked], make: Make) -> list[Turn]:
        """Return the turns of a request, with its claim where it goes on with another one.

        Raises:
            LiveError: the request with its idempotency key is under way.
        """
        if self._log.under_way(who, lambda gateway: gateway != self._bus.name):  # it may have ended meanwhile
            await self._catch_up()
            await self._end_gone(who)
        turns = make(False)
        if not (name := _claimed_by(turns)) or not self._bus.client.is_connected:
            return turns
        try:
            async with asyncio.timeout(_LIMIT_S):
                record = await read_last(self._bus, TURN_CLAIMED, name)
                newest = None if record is None else await read(self._bus, TurnClaimed, record)
        except (TimeoutError, BusError):
            return turns
        known = await self._catch_up()
        turns = make(False)
        new = [turn.id for turn in turns if not turn.repeats]
        if not new:
            return turns
        free = known and (newest is None or self._log.has_begun(newest.turn_id))
        if not (free and await self._take(name, new[0], 0 if record is None else record.sequence)):
            if turns[0].keyed:
                raise LiveError("overloaded", UNDER_WAY)
            return make(True)
        make(False)  # raises where another request of this process has begun meanwhile, and the server is away
        return turns

    async def _end_gone(self, who: Sequence[Asked]) -> None:
        """End the turns of equal requests that dead gateways had under way, with the tokens of them that are stored."""
        gone = self._log.under_way(who, self._facts.is_gone)
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(_LIMIT_S):
                for turn in gone:
                    await self._facts.recall(turn)
        self._log.end(gone, time.time())

    async def _take(self, name: str, turn: str, newest: int) -> bool:
        """Claim a request; False where another gateway was faster."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                claim = TurnClaimed(claim_id=name, turn_id=turn)
                await publish_if_latest(self._bus, claim, newest, headers={TIME_TO_LIVE: self._lease})
        except Fenced:
            return False
        except (TimeoutError, BusError):  # the server is away, or full
            return True
        return True


def _claimed_by(turns: list[Turn]) -> str:
    """Return what the claim of a request is named by; "" where it needs none."""
    if turns[0].keyed:
        return turns[0].keyed
    return next((f"after-{turn.continues}" for turn in turns if turn.continues), "")
