"""Requests to a live run: stop it, change its numbers of processes, and wait for the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeAlias

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import FoundRun, connected, newest_end, run_ended
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import Watch
from topics.actors import MOST_PROCESSES, ScaleRequested, StopRequested
from topics.alerts import UnpauseRequested
from topics.roles import pool_named, pool_of, role_of
from topics.table import Tables

Until: TypeAlias = Callable[[Callable[[], bool], float], Awaitable[bool]]

_POLL_S = 0.2


async def released(found: FoundRun) -> None:
    """Wait until `asyncrl up` has stopped the server too and left the directory; no event announces either."""
    while True:
        if found.root is None or not found.is_held:
            return
        await asyncio.sleep(_POLL_S)


async def ended(found: FoundRun) -> None:
    """Wait until a run has ended.

    Raises:
        RunNotFound: the run is on another machine, and its server does not answer.
    """
    if found.root is None:
        async with connected(found, "wait", over_is_fine=True) as bus:
            await run_ended(bus, 0)
    await released(found)


async def stop(found: FoundRun, reason: str, on_requested: Callable[[], None] = lambda: None) -> None:
    """Ask a live run to stop, and wait until it has ended.

    Args:
        on_requested: called once the request is stored.

    Raises:
        RunNotFound: the run cannot be reached, or is over.
    """
    async with connected(found, "down") as bus:
        ending = asyncio.create_task(run_ended(bus, await newest_end(bus)))  # it may end before this task begins
        await publish(bus, StopRequested(reason))
        on_requested()
        await ending
    await released(found)


@contextlib.asynccontextmanager
async def watched(found: FoundRun, name: str) -> AsyncIterator[tuple[Bus, RunState, Until]]:
    """A connection to a run, its state, and a wait for a condition on it; False after this many seconds.

    Args:
        name: of the connection.

    Raises:
        AsyncRLError, from the wait: the run takes no more requests.
    """
    state = RunState(found.run)
    async with connected(found, name) as bus:
        watch = Watch(bus, state)
        await watch.start()

        async def until(condition: Callable[[], bool], wait_s: float) -> bool:
            try:
                async with asyncio.timeout(wait_s):
                    await watch.until(lambda: not state.takes_requests or condition())
            except TimeoutError:
                return False
            if not condition():
                raise AsyncRLError(f"run {found.run} is {state.phase}; it takes no more requests")
            return True

        try:
            yield bus, state, until
        finally:
            await watch.close()


async def unpause(found: FoundRun, wait_s: float) -> str:
    """Let a live run train again after an alert paused it; returns the name of that alert.

    Raises:
        AsyncRLError: no alert has paused it.
    """
    async with watched(found, "unpause") as (bus, state, until):
        if (alert := state.paused_by) is None:
            raise AsyncRLError(f"run {found.run} is {state.phase}, and no alert has paused it")
        await publish(bus, UnpauseRequested(state.paused_at))
        await until(lambda: state.paused_by is None, wait_s)
        return alert.alert


def check_count(pool: str, count: object, tables: Tables) -> None:
    """Refuse a request for a pool that cannot be scaled, or for an impossible number of processes.

    Only a run knows the roles of its user's actors, so a role that the tables do not have passes.

    Raises:
        WrongUsage: what was expected.
    """
    if role_of(pool) in tables.role_names and role_of(pool) not in tables.scalable:
        raise WrongUsage(f"{pool!r} cannot be scaled; what can: {', '.join(tables.scalable)}")
    if not isinstance(count, int) or not 0 <= count <= MOST_PROCESSES:
        expected = f"expected {pool}=COUNT with a whole number from 0 to {MOST_PROCESSES}"
        raise WrongUsage(f"'{pool}={count}': {expected}")


async def scale(found: FoundRun, wanted: Mapping[str, int], wait_s: float) -> None:
    """Change the numbers of processes of a live run, and wait until as many live.

    Args:
        wanted: processes by pool: a role, or one of several groups of engines.

    Raises:
        AsyncRLError: the run decided otherwise, or does not have them within `wait_s`.
        WrongUsage: the run has no such pool.
    """
    wanted = {pool_named(pool): count for pool, count in wanted.items()}
    async with watched(found, "scale") as (bus, state, until):
        for pool, count in wanted.items():
            if role_of(pool) not in bus.tables.scalable:
                raise WrongUsage(f"{pool!r} cannot be scaled; what can: {', '.join(bus.tables.scalable)}")
            check_count(pool, count, bus.tables)
        _check_known(state, wanted)
        request = await publish(bus, ScaleRequested(dict(wanted)))
        if not await until(lambda: _reached(state, wanted) or _differs(state, wanted, request), wait_s):
            raise AsyncRLError(_shortfall(state, wanted, wait_s))
        if _differs(state, wanted, request):
            raise AsyncRLError(_decision(state, wanted))


def _check_known(state: RunState, wanted: Mapping[str, int]) -> None:
    """Refuse the name of a role whose processes are in several groups, and of a group that is not there."""
    for pool in wanted:
        known = [name for name in state.wanted if role_of(name) == role_of(pool)]
        if known and pool not in known:
            raise WrongUsage(f"run {state.run} has no {pool}; name one of {', '.join(known)}")


def _live(state: RunState, pool: str) -> int:
    return sum(actor.live for actor in state.fleet if pool_of(actor.actor_id) == pool)


def _reached(state: RunState, wanted: Mapping[str, int]) -> bool:
    return all(state.wanted.get(role) == count == _live(state, role) for role, count in wanted.items())


def _differs(state: RunState, wanted: Mapping[str, int], request: int) -> bool:
    """Return whether the request is answered, and the run wants other numbers: by a newer one, or for lack of GPUs."""
    return state.scaled_for >= request and any(state.wanted.get(role) != count for role, count in wanted.items())


def _decision(state: RunState, wanted: Mapping[str, int]) -> str:
    found = [f"{role} {state.wanted.get(role, 0)} instead of {count}" for role, count in wanted.items()]
    return (
        f"the run has decided otherwise: {', '.join(found)}; another request came in between, as `asyncrl "
        "status` shows, or a group has GPUs for no more"
    )


def _shortfall(state: RunState, wanted: Mapping[str, int], wait_s: float) -> str:
    found = ", ".join(f"{role} {_live(state, role)} of {count}" for role, count in wanted.items())
    words = next((actor.error for actor in state.fleet if pool_of(actor.actor_id) in wanted and actor.error), "")
    rest = (
        f"; last error: {words}" if words else "; the run continues with it, and `asyncrl status` shows how far it is"
    )
    return f"after {wait_s:.0f} s there are: {found}{rest}"
