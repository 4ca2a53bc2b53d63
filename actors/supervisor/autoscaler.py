"""Asks for more or fewer processes of the pools in `[autoscale]`, by the request that `asyncrl scale` publishes."""

from __future__ import annotations

import asyncio
from collections import deque

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from asyncrl.bus.publish import publish
from asyncrl.child_pool.pool import ChildPool
from asyncrl.errors import AsyncRLError
from asyncrl.run.autoscale_function import autoscale_setup
from asyncrl.state.autoscale import Change, Look, changes
from asyncrl.state.loads import pool_loads
from asyncrl.state.watch import Watch
from topics.actors import AutoscaleFailed, ScaleRequested

_POLL_S = 1.0  # between two looks at the loads, which nothing announces
_CALL_S = 5.0  # between two calls of the user's function


async def autoscale(context: Context, keeper: Keeper, watch: Watch) -> None:
    """Ask for what the rule decides, until the actor is asked to stop.

    Its decision follows from the state of the run and the loads of the last window. Another supervisor collects its own
    window of loads, and then decides the same. A request names the decision that it is based on, and is void after any
    other decision. A request that is published twice, or after a user's request, therefore changes nothing.
    """
    settings = context.config.autoscale
    if not settings.pools:
        return
    scaler = _Autoscaler(context, keeper, watch)
    try:
        while not context.stop.is_set():
            await asyncio.sleep(_CALL_S if settings.function else _POLL_S)
            await scaler.look()
    finally:
        await scaler.close()


class _Autoscaler:
    """Looks at the loads, and asks once for what follows from them."""

    def __init__(self, context: Context, keeper: Keeper, watch: Watch) -> None:
        settings = context.config.autoscale
        self._context, self._keeper, self._state, self._settings = context, keeper, watch.state, settings
        self._looks: deque[Look] = deque()
        self._asked_after = -1  # decision that the newest request rests on
        self._fault = self._state.autoscale_fault
        base, limit_s = context.files.base, settings.limit_s
        self._function = autoscale_setup(settings.function, base=base, limit_s=limit_s) if settings.function else None
        self._pool: ChildPool | None = None  # in which the function runs, once it has been loaded

    async def look(self) -> None:
        """Take in the present loads; request a change if they call for one."""
        state = self._state
        if state.phase != "running" or not self._context.bus.client.is_connected:
            self._looks.clear()  # the known loads of the queues are old
            return
        now_s = self._keeper.now()
        self._looks.append(Look(now_s, pool_loads(state)))
        while len(self._looks) > 1 and self._looks[1].at_s <= now_s - self._settings.window_s:
            self._looks.popleft()
        answer = await self._answer()
        if answer is None and self._function is not None:
            return
        found = changes(self._settings, self._looks, state.scalings, answer)
        if found and state.scaled_at != self._asked_after:
            self._asked_after = state.scaled_at
            await self._ask(found)

    async def close(self) -> None:
        """End the process of the user's function."""
        if self._pool is not None:
            await self._pool.close()

    async def _ask(self, found: list[Change]) -> None:
        wanted = {change.pool: change.processes for change in found}
        reason = "; ".join(f"{change.pool}: {change.reason}" for change in found)
        self._context.log.info("autoscale asks", reason=reason, **wanted)
        await publish(self._context.bus, ScaleRequested(wanted, by="autoscale", reason=reason, after=self._asked_after))

    async def _answer(self) -> dict[str, int] | None:
        """Return the function's answer; None if there is no function, or if it fails. A failure is published once."""
        if self._function is None:
            return None
        loads = {pool: load.plain() for pool, load in self._looks[-1].loads.items() if pool in self._settings.pools}
        answer, fault = None, ""
        try:
            if self._pool is None:
                self._pool = await ChildPool.open(self._function, workers=1)
            answer = await self._pool.call(loads)
        except AsyncRLError as error:
            fault = str(error)
        if fault != self._fault and not self._context.stop.is_set():
            self._fault = fault
            await self._keeper.append_until_stored([AutoscaleFailed(fault)])
        return answer
