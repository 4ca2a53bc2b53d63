"""The load of each pool of processes: waiting work, running work, and the capacity of its processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from asyncrl.config.settings import Config
from asyncrl.config.slots import held_at_once
from asyncrl.config.tasks import largest_group
from asyncrl.config.worker_pools import config_of_pool
from asyncrl.state.run_state import RunState
from topics.roles import pool_of, role_of

MEASURED = ("rollout", "reward", "groupreward", "judge", "engine")  # roles whose load is known


class PoolLoad(msgspec.Struct, frozen=True):
    """The load of one pool at a moment; a user's function is given it as a mapping."""

    pool: str  # a role, or a group of engines: "engine-large"
    wanted: int  # processes
    live: int
    places: int  # what one process works on at once
    waiting: int  # messages in its queue; for engines requests beyond their places
    under_way: int  # messages that its processes have; for engines requests in their places

    @property
    def room(self) -> int:
        """Places of all live processes."""
        return self.live * self.places

    @property
    def demand(self) -> int:
        """All there is to work on."""
        return self.waiting + self.under_way

    @property
    def idle_share(self) -> float:
        """Share of the places that nothing takes, 0 to 1."""
        return max(0.0, 1.0 - self.under_way / self.room) if self.room else 0.0

    def plain(self) -> dict[str, Any]:
        """Return it as the user's function is given it."""
        return {**msgspec.to_builtins(self), "idle_share": self.idle_share}


def pool_loads(state: RunState) -> dict[str, PoolLoad]:
    """Return the loads of all pools whose load is known, by pool."""
    found = {}
    for pool, wanted in state.wanted.items():
        if role_of(pool) in MEASURED:
            found[pool] = _engines(state, pool, wanted) if role_of(pool) == "engine" else _workers(state, pool, wanted)
    return found


def queued(state: RunState, role: str) -> Counter[str]:
    """Return the counts of the work queues of all pools of a role."""
    counts = Counter[str]()
    for queue in state.tables.queues_of(role):
        counts.update(state.queues.get(queue.name, {}))
    return counts


def _workers(state: RunState, pool: str, wanted: int) -> PoolLoad:
    queue = state.queues.get(pool, {})
    live = sum(actor.live for actor in state.of_role(role_of(pool)) if pool_of(actor.actor_id) == pool)
    places = places_of(state.config, pool)
    return PoolLoad(pool, wanted, live, places, queue.get("waiting", 0), queue.get("under_way", 0))


def _engines(state: RunState, pool: str, wanted: int) -> PoolLoad:
    places = places_of(state.config, pool)
    ready = {name for name, engine in state.engines.items() if engine.state != "gone"}
    live = [
        actor
        for actor in state.of_role("engine")
        if actor.live and actor.actor_id in ready and pool_of(actor.actor_id) == pool
    ]
    requests = [int(actor.gauge("requests") or 0) for actor in live]
    under_way = sum(min(count, places) for count in requests)
    return PoolLoad(pool, wanted, len(live), places, sum(requests) - under_way, under_way)


def places_of(config: Config, pool: str) -> int:
    """Return what one process of a pool works on at once."""
    if role_of(pool) == "engine":
        group = config.engine.pools.get(pool)
        return group.max_running if group is not None else 1
    if pool == "groupreward":  # which are grades of groups
        return max(1, config.reward.in_flight // largest_group(config))
    own = config_of_pool(config, pool)
    return {"rollout": held_at_once(own), "judge": own.live.judge.in_flight}.get(role_of(pool), own.reward.in_flight)
