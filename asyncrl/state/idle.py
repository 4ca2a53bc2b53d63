"""Engines and learners that wait for each other, and the change that uses them."""

from __future__ import annotations

from asyncrl.config.slots import first_slots
from asyncrl.config.worker_pools import config_of_actor
from asyncrl.state.run_state import RunState
from topics.roles import pool_of

_IDLE = 0.1  # share of the time that is worth a hint
_STEPS = 4  # of RL that show how a run is paced


def idle_hints(state: RunState) -> list[str]:
    """Return what is idle for more than a tenth of the time, and one change that uses it; empty for a finished run."""
    steps = [step for step in state.steps if step.message.stage == "rl" and step.time_ns >= state.opened_ns]
    if len(steps) <= _STEPS or state.finished:
        return []
    span_s = (steps[-1].time_ns - steps[0].time_ns) / 1e9
    trained_s = sum(step.message.metrics.get("train_s", 0.0) for step in steps[1:])
    learner, slots = max(0.0, 1 - trained_s / span_s), max(0.0, 1 - _taken(state))
    words = f"the learner trains {1 - learner:.0%} of the time, and {1 - slots:.0%} of the rollout slots are taken"
    buffer = state.config.buffer
    if slots > _IDLE and (full := _full_pool(state)):
        return [f"other workers wait for the pool {full}, whose slots are all taken: {words}; {_more(state, full)}"]
    if slots > _IDLE and learner > _IDLE:
        return [
            f"engines and learner wait for each other: {words}; raise buffer.max_lag from {buffer.max_lag} to "
            f"{buffer.max_lag + 1}, so that engines sample more batches ahead"
        ]
    if slots > _IDLE:
        engines = _engines(state)
        change = f"take one away, `asyncrl scale engine={engines - 1}`" if engines > 1 else "give the learner more GPUs"
        return [f"engines are idle: {words}; {change}"]
    if learner > _IDLE:
        return [f"the learner is idle: {words}; add an engine, `asyncrl scale engine={_engines(state) + 1}`"]
    return []


def _engines(state: RunState) -> int:
    return sum(count for pool, count in state.wanted.items() if pool.startswith("engine"))


def _full_pool(state: RunState) -> str:
    """Return a pool of rollout workers that has more work than slots; "" if there is none."""
    pools = dict.fromkeys(pool_of(actor.actor_id) for actor in state.of_role("rollout") if actor.live)
    waiting = (pool for pool in pools if state.queues.get(pool, {}).get("waiting", 0))
    return next((pool for pool in waiting if _taken(state, pool) > 1 - _IDLE), "")


def _more(state: RunState, pool: str) -> str:
    return f"add a worker, `asyncrl scale {pool.replace('-', '.')}={state.wanted.get(pool, 1) + 1}`"


def _taken(state: RunState, pool: str = "") -> float:
    """Return the share of the rollout slots, of all pools or of one, that have a trajectory."""
    workers = [actor for actor in state.of_role("rollout") if actor.live and actor.gauge("held") is not None]
    workers = [actor for actor in workers if pool in ("", pool_of(actor.actor_id))]
    slots = sum(actor.gauge("slots") or first_slots(config_of_actor(state.config, actor.actor_id)) for actor in workers)
    held = sum(max(0.0, (actor.gauge("held") or 0.0) - state.config.sandbox.ready) for actor in workers)
    return min(1.0, held / slots) if slots else 1.0
