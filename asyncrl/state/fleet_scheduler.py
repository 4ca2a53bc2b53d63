"""Several runs, one fleet: processes move between runs by weight, as the supervisor of each is asked.

A run is asked for fewer first, and another for more once they have left: so two engines never meet on a GPU. It keeps
no state: a restart finds the processes of each run in its topics and continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from asyncrl.background import BackgroundTasks
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusGone, BusUnreachable
from asyncrl.bus.publish import publish
from asyncrl.config.engine_settings import Capability, EngineGroup
from asyncrl.config.pools import lent_pools
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.locks import take
from asyncrl.run.connect import FoundRun, NoSuchRun, RunNotFound, RunStarts, connected, run_ended
from asyncrl.state.fair_share import Apportionment, Held, granted
from asyncrl.state.loads import MEASURED, pool_loads
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import Watch
from topics.actors import ScaleRequested
from topics.roles import pool_of, role_of

_POLL_S = 0.25  # between two looks, since nothing announces that time has passed
_AGAIN_S = 1.0  # between two looks for a run that is not there
_IDLE_S = 15.0  # seconds in which a run without work keeps its processes


class Sharing(NamedTuple):
    """The pools that are divided, and how."""

    weights: Mapping[str, Fraction]  # by run, as the user names it
    pools: Mapping[str, int]  # processes, by pool
    window_s: float  # seconds over which the shares hold
    wait_s: float  # seconds for runs to be there at the beginning


class _Member:
    """A run that shares; `state` is None while it is not there."""

    def __init__(self, name: str, find: Callable[[], FoundRun]) -> None:
        self.name, self.find = name, find
        self.bus: Bus | None = None
        self.state: RunState | None = None
        self.seen = False  # it has shared before
        self.absent = ""  # why it is not
        self.unknown = False  # nothing has its name
        self.starts = False  # it will be there
        self._asked: dict[str, int] = {}
        self._asked_after = -1  # decision that the newest request rests on
        self._worked_s = 0.0  # when it had work last

    def join(self, bus: Bus, state: RunState) -> None:
        """Take part from here on."""
        self.bus, self.state, self.seen, self.absent = bus, state, True, ""
        self._asked, self._asked_after, self._worked_s = {}, -1, time.monotonic()

    @property
    def _waits(self) -> bool:
        """Return whether its supervisor has not answered the newest request yet."""
        return self.state is not None and self.state.scaled_at == self._asked_after

    @property
    def listens(self) -> bool:
        """Return whether it may be asked now."""
        return self.bus is not None and self.bus.client.is_connected and not self._waits

    def has(self, pool: str) -> int:
        """Return the number of processes that it wants."""
        assert self.state is not None
        return self.state.wanted[pool]

    def held(self, pool: str, now_s: float) -> Held:
        """Return its processes of a pool, and whether it has had work lately."""
        assert self.state is not None
        if _has_work(self.state):
            self._worked_s = now_s
        there = sum(actor.live for actor in self.state.fleet if pool_of(actor.actor_id) == pool)
        asked = self._asked.get(pool, 0) if self._waits else 0
        load = pool_loads(self.state)[pool]
        return Held(load.live, max(load.wanted, there, asked), now_s - self._worked_s <= _IDLE_S)

    async def ask(self, wanted: dict[str, int], reason: str) -> None:
        """Ask its supervisor for other numbers of processes; where its server is away, it is asked at the next look."""
        assert self.state is not None
        assert self.bus is not None
        self._asked, self._asked_after = wanted, self.state.scaled_at
        try:
            await publish(self.bus, ScaleRequested(wanted, by="share", reason=reason, after=self._asked_after))
        except BusError:
            self._asked_after = -1


class Sharer:
    """Follows the runs, and asks for what each shall have."""

    def __init__(self, sharing: Sharing, find: Callable[[str], FoundRun], report: Callable[[str], None]) -> None:
        """
        Args:
            find: returns a run by the name that the user gave it, or raises `RunNotFound`.
            report: called with lines for people.
        """
        self._sharing, self._report = sharing, report
        self._members = [_Member(name, partial(find, name)) for name in sharing.weights]
        self._divided = {
            pool: Apportionment(sharing.weights, count, sharing.window_s) for pool, count in sharing.pools.items()
        }
        self._dealt: dict[str, dict[str, int]] = {}  # by pool, as it was reported last

    async def run(self) -> None:
        """Continue until all runs that appeared are over.

        Raises:
            WrongUsage: a run does not share these pools.
            AsyncRLError: another process shares it, or it did not appear.
        """
        faults: list[BaseException] = []
        tasks = BackgroundTasks(faults.append)
        for member in self._members:
            tasks.start(self._follow(member))
        began_s = reported_s = time.monotonic()
        try:
            while not (faults or self._over):
                await asyncio.sleep(_POLL_S)
                self._check_there(time.monotonic() - began_s > self._sharing.wait_s)
                await self._look(time.monotonic())
                if time.monotonic() - reported_s >= self._sharing.window_s:
                    reported_s = time.monotonic()
                    self._report_shares()
        finally:
            tasks.cancel()
            await tasks.ended()
        if faults:
            raise faults[0]

    @property
    def _over(self) -> bool:
        return any(member.seen for member in self._members) and not self._there

    @property
    def _there(self) -> list[_Member]:
        return [member for member in self._members if member.state is not None]

    def _check_there(self, waited: bool) -> None:
        """Give up if a name has no run in time, or no run ever appeared and none is starting.

        Raises:
            AsyncRLError: which, and why.
        """
        missing = [member for member in self._members if member.unknown and not member.seen and waited]
        if not missing and not any(member.seen for member in self._members):
            missing = self._members if waited or all(one.absent and not one.starts for one in self._members) else []
        if missing:
            words = "; ".join(dict.fromkeys(member.absent or f"{member.name} does not answer" for member in missing))
            raise AsyncRLError(f"nothing to share with: {words}")

    async def _follow(self, member: _Member) -> None:
        """Follow a run whenever it is there."""
        while True:
            try:
                found = member.find()
                async with _joined(found) as (bus, watch):
                    self._check(member.name, watch.state)
                    member.join(bus, watch.state)
                    self._report(f"{member.name} shares")
                    await _ended(found, bus, watch)
            except (RunNotFound, BusError) as error:
                member.unknown = isinstance(error, NoSuchRun)
                # An unknown one may not have written its directory yet; one that was there may be slow to answer.
                member.starts = member.unknown or isinstance(error, RunStarts | BusGone | BusUnreachable)
                if str(error) != member.absent and member.state is None:
                    member.absent = str(error)
                    self._report(f"{member.name} is not there: {error}")
            if member.state is not None:
                member.state = None
                self._report(f"{member.name} is over")
            await asyncio.sleep(_AGAIN_S)

    def _check(self, name: str, state: RunState) -> None:
        """Refuse a run that cannot share these pools.

        Raises:
            WrongUsage: for what reason, and what to do.
        """
        for pool, count in self._sharing.pools.items():
            if words := why_not(state, pool, count):
                raise WrongUsage(f"run {name} cannot share {pool}: {words}")
            for other in self._there:
                assert other.state is not None
                if words := gpus_that_meet(state, other.state, pool):
                    raise WrongUsage(f"runs {name} and {other.name} cannot share {pool}: {words}")

    async def _look(self, now_s: float) -> None:
        there = {member.name: member for member in self._members if member.state is not None}
        asks: dict[str, dict[str, int]] = {name: {} for name in there}
        for pool, count in self._sharing.pools.items():
            held = {name: member.held(pool, now_s) for name, member in there.items()}
            decided = self._divided[pool].decide(now_s, held)
            if decided and decided != self._dealt.get(pool):
                self._dealt[pool] = decided
                self._report(f"{pool}: " + ", ".join(f"{name} {number}" for name, number in decided.items()))
            had = {name: member.has(pool) for name, member in there.items()}
            for name, number in granted(decided, had, {name: one.all for name, one in held.items()}, count).items():
                asks[name] |= {pool: number} if number != had[name] else {}
        for name, wanted in asks.items():
            if wanted and there[name].listens:
                await there[name].ask(wanted, self._reason(name, next(iter(wanted))))

    def _reason(self, name: str, pool: str) -> str:
        divided = self._divided[pool]
        worked, due = divided.shares().get(name), divided.due(name)
        return f"had {worked or 0.0:.2f} of {due:.2f} in the last {self._sharing.window_s:g} s"

    def _report_shares(self) -> None:
        """Report the shares of the last window and the shares by weight."""
        for pool, divided in self._divided.items():
            shares = divided.shares()
            words = ", ".join(f"{name} {share:.2f} of {divided.due(name):.2f}" for name, share in shares.items())
            if words:
                self._report(f"{pool} in the last {self._sharing.window_s:g} s: {words}")


@contextlib.asynccontextmanager
async def _joined(found: FoundRun) -> AsyncIterator[tuple[Bus, Watch]]:
    """A run that no other process shares, followed.

    Raises:
        RunNotFound: it is over, or still starting.
        BusError: its server does not answer.
        AsyncRLError: another process shares it.
    """
    async with connected(found, "share") as bus:
        lock = take(found.files.sharing) if found.root is not None else -1
        if lock is None:
            raise AsyncRLError(f"another `asyncrl share` moves processes of run {found.run}; end that one first")
        watch = Watch(bus, RunState(found.run))
        try:
            await watch.start()
            if not watch.state.wanted:
                raise RunStarts(f"run {found.run} is still starting")
            yield bus, watch
        finally:
            await watch.close()
            if lock >= 0:
                os.close(lock)


async def _ended(found: FoundRun, bus: Bus, watch: Watch) -> None:
    """Wait until a run is over; on this machine also if it was killed, with or without its server."""
    if found.root is None:
        await run_ended(bus)
        return
    while found.is_held and not watch.state.over:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):  # nothing announces that it was killed
                await watch.until(lambda: watch.state.over)


def _has_work(state: RunState) -> bool:
    """Return whether trajectories wait or run; requests to a gateway may come at any time."""
    queues = [state.queues.get(queue.name, {}) for queue in state.tables.queues_of("rollout")]
    return bool(state.config.gateway.count) or any(one.get("waiting") or one.get("under_way") for one in queues)


def why_not(state: RunState, pool: str, count: int) -> str:
    """Return why a run cannot share this many processes of a pool, and the remedy; empty if it can."""
    config = state.config
    known = [name for name in state.wanted if role_of(name) in MEASURED]
    if pool not in known:
        return f"it has no pool of that name; name one of {', '.join(known)}"
    if pool in config.autoscale.pools:
        return f"its config has autoscale.pools.{pool}, which would change the number too; remove that"
    group = config.engine.pools.get(pool)
    if group is not None and count > group.most:
        return f"its config has GPUs or addresses for {group.most} of {count}; name all {count} there"
    if pool not in lent_pools(config):
        return f"its config keeps it; put {role_of(pool)} into its placement.lent"
    return ""


def gpus_that_meet(one: RunState, other: RunState, pool: str) -> str:
    """Return how engines of two runs would use one GPU, and the remedy; empty if they would not.

    The engines of a run have the first GPUs of its list: in lists that are each other's reverse, runs that have no
    more engines together than there are GPUs never have the same.
    """
    groups = [state.config.engine.pools.get(pool) for state in (one, other)]
    mine, others = [_gpus(group) if group is not None else [] for group in groups]
    if mine == others[::-1]:
        return ""
    return f"engines take the first GPUs of {mine} and of {others}; expected each list to be the other in reverse"


def _gpus(group: EngineGroup) -> list[int] | list[str]:
    """The GPUs of a group, or its servers, where the config numbers them."""
    return group.addresses if group.can(Capability.ADDRESSES) else group.gpus
