"""Requests and tokens of tenants, counted over all gateways and their restarts."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from actors.gateway.turn_store import TurnStore
from actors.runtime.actor import Context
from asyncrl.bus.log import Record, first_since
from asyncrl.bus.publish import BY
from asyncrl.live.quotas import DAY_S, MINUTE_S, Usage
from topics.keys import TURN_COUNTED, KeyAdded, TurnCounted
from topics.topic import TURNS, Topic


class Meter:
    """Counts requests whose keys have limits, and those of which nothing else is stored."""

    def __init__(self, context: Context, facts: TurnStore) -> None:
        self._usage = Usage()
        self._facts = facts
        self._bus = context.bus
        self._counts = context.listen(TURNS, self._take, [TURN_COUNTED])
        self._before = 0  # sequence of the last turn that was stored before it began

    async def start(self, before: int) -> None:
        """Read the counts of the day and of the last minute.

        Args:
            before: sequence of the last turn that was stored before this process.
        """
        self._before = before
        now_s = time.time()
        since_s = min(now_s // DAY_S * DAY_S, now_s - MINUTE_S)  # also a minute that began on the day before
        await self._counts.start(await first_since(self._bus, TURNS, int(since_s * 1e9)) - 1)
        await self._counts.caught_up()

    async def close(self) -> None:
        """Read no more."""
        await self._counts.close()

    def begin(self, key: KeyAdded, *, replies: bool = True) -> float:
        """Count a request that begins; returns when, seconds since 1970.

        Args:
            replies: it asks for a reply; else it may come when the tokens of the day are used.

        Raises:
            LiveError: its key's limit is reached.
        """
        now_s = time.time()
        self._usage.begin(key if replies else msgspec.structs.replace(key, tokens_per_day=0), now_s)
        return now_s

    async def end(self, key: KeyAdded, turn_id: str, begun_s: float, tokens: int, *, unstored: int) -> None:
        """Store the size of a request that has ended.

        Args:
            unstored: replies that are not stored, or not whole: they are private, or there was no room.
        """
        if unstored or key.requests_per_minute or key.tokens_per_day:
            counted = TurnCounted(turn_id, key.tenant, begun_s, tokens, key.key_id, unstored)
            self._usage.take(counted, known=True)
            await self._facts.put(counted, anyway=True)

    def _take(self, _topic: Topic[Any], counted: TurnCounted, record: Record) -> None:
        if record.sequence <= self._before or record.headers.get(BY, "") != self._bus.name:
            self._usage.take(counted)
