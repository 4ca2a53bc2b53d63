"""The rule by which pools grow and shrink: a pure function of loads, bounds and earlier decisions.

It cannot flap at a constant demand. A pool grows only where work has waited all through the window, and shrinks only to
a number whose places hold the greatest demand of the window with half the idle share that makes it shrink to spare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncrl.config.process_settings import AutoscaleSettings
from asyncrl.state.loads import PoolLoad
from asyncrl.state.records import Scaling

_GROWTH = 2  # times as many processes at once, at most


class Look(NamedTuple):
    """The loads of all pools at a moment."""

    at_s: float  # server's clock
    loads: Mapping[str, PoolLoad]


class Change(NamedTuple):
    """Another number of processes for a pool."""

    pool: str
    processes: int
    reason: str


def changes(
    settings: AutoscaleSettings,
    looks: Sequence[Look],
    scalings: Mapping[str, Scaling],
    answer: Mapping[str, int] | None,
) -> list[Change]:
    """Return which pools shall have another number of processes, as of the newest look.

    Args:
        settings: bounds, thresholds, times.
        looks: oldest first; those older than the window are ignored.
        scalings: the newest change of each pool.
        answer: of the user's function, in place of the rule; None without one.
    """
    now_s = looks[-1].at_s
    window = [look for look in looks if look.at_s >= now_s - settings.window_s]
    whole = looks[0].at_s <= now_s - settings.window_s  # the window has been seen from its beginning
    found = []
    for pool in settings.pools:
        load = looks[-1].loads.get(pool)
        if load is None or held(settings, pool, load, scalings.get(pool), now_s):
            continue
        if answer is not None:
            wish = _answered(pool, load, answer)
        else:
            wish = _by_rule(settings, [look.loads[pool] for look in window if pool in look.loads]) if whole else None
        change = _bounded(settings, load, wish)
        found += [change] if change is not None else []
    return found


def held(settings: AutoscaleSettings, pool: str, load: PoolLoad, last: Scaling | None, now_s: float) -> str:
    """Return why a pool may not change now, for any load; empty if it may."""
    if last is not None:
        ago_s = now_s - last.time_ns / 1e9
        if last.by == "command" and ago_s < settings.hand_s:
            return f"left as asyncrl scale asked, for {settings.hand_s - ago_s:.0f} s more"
        if last.by == "autoscale" and ago_s < settings.cool_s:
            return f"changed {ago_s:.0f} s ago, left alone for {settings.cool_s - ago_s:.0f} s more"
    if load.live != load.wanted:
        return f"{load.live} of {load.wanted} live"
    return ""


def _by_rule(settings: AutoscaleSettings, loads: Sequence[PoolLoad]) -> Change | None:
    load = loads[-1]
    if load.room and min(one.waiting for one in loads) > settings.grow_waiting * load.room:
        least = min(one.demand for one in loads)
        count = min(max(load.wanted + 1, math.ceil(least / load.places)), _GROWTH * load.wanted)
        return Change(load.pool, count, f"{load.waiting:,} wait for {load.room:,} places")
    idle = min(one.idle_share for one in loads)
    if idle > settings.shrink_idle and not any(one.waiting for one in loads):
        most = max(one.demand for one in loads)
        count = max(1, math.ceil(most / (load.places * (1.0 - settings.shrink_idle / 2))))
        return Change(load.pool, min(count, load.wanted), f"{100 * idle:.0f} % of {load.room:,} places idle")
    return None


def _answered(pool: str, load: PoolLoad, answer: Mapping[str, int]) -> Change | None:
    count = answer.get(pool, load.wanted)
    return Change(pool, count, f"your function answers {count}")


def _bounded(settings: AutoscaleSettings, load: PoolLoad, wish: Change | None) -> Change | None:
    """Keep a wish within the bounds; a pool that is outside of them goes there without any."""
    bounds = settings.pools[load.pool]
    wished = load.wanted if wish is None else wish.processes
    count = max(bounds.min, min(bounds.max, wished))
    if count == load.wanted:
        return None
    bound = "" if count == wished else f"autoscale.pools.{load.pool} is {bounds.min} to {bounds.max}"
    reason = "" if wish is None or wish.processes == load.wanted else wish.reason
    return Change(load.pool, count, "; ".join(filter(None, (reason, bound))))
