"""Claims of requests that continue earlier ones: if several gateways get the same request, only one answers it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from actors.gateway.turn import Turn
from actors.gateway.turn_store import TurnStore
from actors.runtime.actor import Context
from asyncrl.background import all_of
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import TIME_TO_LIVE, Fenced, publish_if_latest, read
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.turn_log import UNDER_WAY, Asked, TurnLog
from topics.turns import TURN_CLAIMED, TurnClaimed, TurnFinished

_LIMIT_S = 2.0  # for the server to answer; without it requests are answered as they come
_SPARE_S = 10.0  # between the place of a request and the begin of its turn
_LOST_S = 0.02  # for a process to notice that a connection was closed by its client
_AFTER = "after-"  # begins the name of the claim of a request that continues a turn

Make = Callable[[bool], list[Turn]]
"""Returns the turns of a request from the known facts; True: they continue no stored turn."""


class Claims:
    """Claims idempotency keys, and cut turns that a request continues, before the begin of its turn is stored.

    A claim is appended after the newest claim that existed before the stored turns were read. If another gateway was
    faster, there is a newer one. It expires, so that a request whose gateway died between the two is free again.

    Another gateway may be running an equal request, whose client has just gone. A claim of that turn asks: its
    gateway claims it for the turn itself while the client is there, and else is about to store its end.
    """

    def __init__(
        self,
        context: Context,
        log: TurnLog,
        catch_up: Callable[[], Awaitable[bool]],
        facts: TurnStore,
        has_client: Callable[[str], bool],
    ) -> None:
        """
        Args:
            catch_up: waits for what other gateways have stored; returns whether it is all there.
            facts: knows which of them live.
            has_client: whether a turn is running here, and its client's connection is not lost.
        """
        self._bus = context.bus
        self._tasks = context.tasks
        self._log = log
        self._catch_up = catch_up
        self._facts = facts
        self._has_client = has_client
        # A request may wait this long before it starts.
        self._lease = f"{math.ceil(context.config.gateway.queue_timeout_s + _SPARE_S)}s"
        self._asked: dict[str, asyncio.Future[None]] = {}  # of turns of other gateways
        self._keeping: set[str] = set()  # turns of this one, of which another gateway asks

    async def turns(self, who: Sequence[Asked], make: Make) -> list[Turn]:
        """Return the turns of a request, with its claim if it continues another request.

        Raises:
            LiveError: the request with its idempotency key is running.
        """
        mine: set[str] = set()  # turns that claims of this request name already
        if self._elsewhere(who):  # it may have ended since
            await self._catch_up()
            await self._end_gone(who)
            newest_of_each = [equal[-1] for choice in who if (equal := self._elsewhere([choice]))]
            if newest_of_each:
                mine = {*await all_of(*map(self._ask, newest_of_each))}
                await self._end_gone(who)  # if that gateway died instead of answering
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
        new = [turn for turn in turns if not turn.repeats]
        if not new:
            return turns
        is_free = newest is None or newest.turn_id in mine | {_free(name)} or self._log.has_begun(newest.turn_id)
        free = known and is_free
        if not (free and await self._take(name, new[0], 0 if record is None else record.sequence)):
            if turns[0].keyed:
                raise LiveError("overloaded", UNDER_WAY)
            return make(True)
        make(False)  # raises if another request of this process has begun since, and the server is unreachable
        return turns

    @contextlib.asynccontextmanager
    async def kept(self, turns: Sequence[Turn]) -> AsyncIterator[None]:
        """Keep the claim of a request while its new turns run; if no begin is stored, release the claim."""
        try:
            yield
        finally:
            name, sequence = turns[0].claim if turns else ("", 0)
            if name and not any(turn.recorded for turn in turns):
                with contextlib.suppress(TimeoutError, BusError):  # it expires
                    async with asyncio.timeout(_LIMIT_S):
                        await self._store(name, _free(name), sequence)

    def take(self, fact: TurnFinished | TurnClaimed) -> None:
        """Take in what another gateway has stored, once the turns know it."""
        if isinstance(fact, TurnFinished):
            self._answer(fact.turn_id)
        elif fact.claim_id.startswith(_AFTER):
            turn = fact.claim_id.removeprefix(_AFTER)
            if fact.turn_id == turn:
                self._answer(turn)
            elif turn not in self._keeping and self._has_client(turn):
                self._keeping.add(turn)
                self._tasks.start(self._keep(turn))

    def _answer(self, turn: str) -> None:
        asked = self._asked.get(turn)
        if asked is not None and not asked.done():
            asked.set_result(None)

    def _elsewhere(self, who: Sequence[Asked]) -> list[str]:
        """Return the turns of equal requests that run at other gateways."""
        return self._log.under_way(who, lambda gateway: gateway != self._bus.name)

    async def _ask(self, turn: str) -> str:
        """Wait until a turn of another gateway has ended, or that one says that its client is there; one that does
        neither is not waited for. Returns the turn that the claim names; "" if there is no claim."""
        if (asked := self._asked.get(turn)) is not None:  # another request asks
            await asyncio.wait([asked], timeout=_LIMIT_S)
            return ""
        if not self._bus.client.is_connected:
            return ""
        asked = self._asked[turn] = asyncio.get_running_loop().create_future()
        name, claim, mine = f"{_AFTER}{turn}", secrets.token_hex(12), ""
        try:
            async with asyncio.timeout(_LIMIT_S):
                record = await read_last(self._bus, TURN_CLAIMED, name)
                await self._store(name, claim, 0 if record is None else record.sequence)
                mine = claim
                await asyncio.wait([asked])
        except (TimeoutError, BusError):
            pass  # the turn is not known to have ended: it is sampled again
        finally:
            self._answer(turn)
            del self._asked[turn]
        return mine

    async def _keep(self, turn: str) -> None:
        """Claim a turn for itself, if its client is still there."""
        await asyncio.sleep(_LOST_S)
        self._keeping.discard(turn)
        name = f"{_AFTER}{turn}"
        with contextlib.suppress(TimeoutError, BusError):  # a gateway that claims it in the same moment asks again
            async with asyncio.timeout(_LIMIT_S):
                record = await read_last(self._bus, TURN_CLAIMED, name)
                if record is not None and self._has_client(turn):
                    await self._store(name, _free(name), record.sequence)

    async def _end_gone(self, who: Sequence[Asked]) -> None:
        """End the turns of equal requests that dead gateways were running, with their stored tokens."""
        gone = self._log.under_way(who, self._facts.is_gone)
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(_LIMIT_S):
                for turn in gone:
                    await self._facts.recall(turn)
        self._log.end(gone, time.time())

    async def _take(self, name: str, turn: Turn, newest: int) -> bool:
        """Claim a request; False where another gateway was faster."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                turn.claim = name, await self._store(name, turn.id, newest)
        except Fenced:
            return False
        except (TimeoutError, BusError):  # the server is away, or full
            return True
        return True

    async def _store(self, name: str, turn: str, newest: int) -> int:
        claim = TurnClaimed(claim_id=name, turn_id=turn)
        return await publish_if_latest(self._bus, claim, newest, headers={TIME_TO_LIVE: self._lease})


def _free(name: str) -> str:
    """Return the turn of a claim that is free."""
    return name.removeprefix(_AFTER)


def _claimed_by(turns: list[Turn]) -> str:
    """Return the name of a request's claim; "" if it needs no claim."""
    if turns[0].keyed:
        return turns[0].keyed
    return next((f"{_AFTER}{turn.continues}" for turn in turns if turn.continues), "")
