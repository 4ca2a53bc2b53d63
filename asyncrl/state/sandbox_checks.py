"""Faults of the sandbox pools of rollout workers."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.state.findings import finding
from asyncrl.state.records import Actor, counted
from asyncrl.state.run_state import RunState
from topics.stalls import StallFound

_IDLE = 0.1  # share of the slots
_REFUSED_S = 5.0  # without a start


def pool_faults(state: RunState) -> Iterator[StallFound]:
    """Find pools that are empty, throttled or leaking."""
    for actor in state.of_role("rollout"):
        if actor.live:
            yield from _pool(state, actor)


def _pool(state: RunState, actor: Actor) -> Iterator[StallFound]:
    existing, left = int(actor.gauge("sandboxes") or 0), int(actor.gauge("sandboxes_left") or 0)
    refused_s, reason = actor.ago_s("sandbox_refused_at_s"), actor.vitals.sandbox_fault if actor.vitals else ""
    if refused_s > _REFUSED_S:
        evidence = f"no sandbox has started for {refused_s:.0f} s, {existing} exist; the last reason: {reason}"
        yield finding("sandbox pool throttled", actor.actor_id, evidence)
    elif (idle := actor.gauge("slots_unprepared") or 0.0) > _IDLE:
        slots, ready = actor.gauge("slots") or 0.0, state.config.sandbox.ready
        held, preparing = actor.gauge("held") or 0.0, actor.gauge("preparing") or 0.0
        evidence = (
            f"{idle:.0%} of its {slots:.0f} slots wait for sandboxes; {preparing:.0f} are being prepared, the last one "
            f"took {actor.gauge('prepare_s') or 0.0:.1f} s; it holds {held:.0f} trajectories of at most "
            f"{slots + ready:.0f}, with sandbox.ready = {ready}"
        )
        yield finding("sandbox pool empty", actor.actor_id, evidence)
    if left:
        evidence = f"{counted(left, 'sandbox')} did not end when told to, and {existing} more exist"
        yield finding("sandbox pool leaking", actor.actor_id, evidence)
