"""One line about a run that is well."""

from __future__ import annotations

from asyncrl.state.records import FLAT_STEPS, taught_nothing
from asyncrl.state.run_state import RunState
from topics.roles import role_of

_RECENT_STEPS = 8


def headline(state: RunState) -> str:
    """Describe the run in one line, without findings."""
    if state.finished or state.stop_requested:
        return "stopping"
    newest = state.steps[-1] if state.steps else None
    if not state.opened_ns:
        return "starting: not opened yet"
    if not state.config.trains:
        return _serving(state)
    if newest is None or newest.time_ns < state.opened_ns:
        ever = "yet" if newest is None else "since"
        return f"starting: opened {state.since_s(state.opened_ns):.0f} s ago, no step {ever}"
    step, warm = newest.message.step, state.warmup_steps
    place = f"{step} of {state.total}" if newest.message.stage == "rl" else f"{step + warm} of {warm} of warm-up"
    recent = [step.message for step in state.steps[-_RECENT_STEPS:] if step.message.stage == "rl"]
    flat = len(recent) >= FLAT_STEPS and all(map(taught_nothing, recent))
    remark = f"; all rewards of a batch were equal in its last {len(recent)} steps: nothing is learned" if flat else ""
    return f"healthy: step {place}, {max(0.0, state.since_s(newest.time_ns)):.1f} s ago{remark}"


def _serving(state: RunState) -> str:
    if "gateway" in state.config.only and state.serves_ns < state.opened_ns:
        return "starting: no gateway accepts requests yet"
    if "buffer" in state.config.only:
        return f"sampling: {state.packed or 0:,} of {state.total:,} batches are graded"
    ready = sum(engine.state == "ready" for name, engine in state.engines.items() if role_of(name) == "engine")
    return f"serving: {ready} of {len(state.names_of('engine'))} engines take requests"
