"""Findings of the doctor about live traffic: a served version that is too old, and figures beyond their bounds."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.pools import purpose_of
from asyncrl.state.findings import finding
from asyncrl.state.run_state import RunState
from topics.roles import SUPERVISOR
from topics.stalls import StallFound

AHEAD = "retention_clock_ahead_s"  # vital sign of the supervisor: nothing is erased while it is not 0
_SHARES = {  # vital sign, bound of `live.safety`, and its object
    "live_invalid_calls": ("invalid_calls", "of the newest replies have a call of a tool that is none"),
    "live_questions": ("questions", "of the newest replies ask their user needlessly"),
    "live_disagreement": ("disagreement", "of the newest grades of judges are spoken against by their users"),
}


def live_faults(state: RunState) -> Iterator[StallFound]:
    """Everything that is wrong with live traffic; none in a run without a gateway."""
    if not state.config.gateway.count:
        return
    yield from _behind(state)
    yield from _alarms(state)
    yield from _unrecorded(state)
    yield from _kept(state)


def _behind(state: RunState) -> Iterator[StallFound]:
    """A version so old that nothing it says can be trained."""
    most = state.config.buffer.max_lag
    if state.version is None or not state.config.live.fraction:
        return
    for engine_id, engine in sorted(state.engines.items()):
        if purpose_of(state.config, engine_id) != "live" or engine.version is None:
            continue
        lag = state.version - engine.version
        if lag > most and engine.state == "ready":
            skipped = sum(actor.gauge("turns_skipped_behind") or 0 for actor in state.of_role("sessions"))
            evidence = (
                f"version {engine.version} is live, {lag} versions behind training; buffer.max_lag = {most}, so its "
                f"turns are not trained ({skipped:.0f} so far)"
            )
            yield finding("channel behind", engine_id, evidence)
            return  # the others are as old


def _unrecorded(state: RunState) -> Iterator[StallFound]:
    """Turns that were served and are not stored: there was no room for what waits, or nothing redacted them."""
    for actor in state.of_role("gateway"):
        if actor.live and (failed := actor.gauge("redactions_failed")):
            yield finding(
                "turns unrecorded", actor.actor_id, f"{failed:.0f} turns were served and not stored: live.redact failed"
            )
        if actor.live and (lost := actor.gauge("turns_unrecorded")):
            full = "the disk of the spool took no more" if actor.gauge("spool_failed") else "gateway.spool_mb was full"
            full = "the NATS server refused their facts" if actor.gauge("facts_refused") else full
            waits = f"{actor.gauge('facts_waiting') or 0:.0f} facts wait"
            yield finding(
                "turns unrecorded", actor.actor_id, f"{lost:.0f} turns were served and not stored: {full}; {waits}"
            )


def _alarms(state: RunState) -> Iterator[StallFound]:
    safety = state.config.live.safety
    nats = state.metrics.get("live_reference_kl", 0.0)
    if safety.kl_bound and nats > safety.kl_bound:
        words = f"live turns are {nats:.3g} nats per token from the reference; live.safety.kl_bound"
        yield finding("live alarm", "kl_bound", f"{words} = {safety.kl_bound:g}, so no version is promoted")
    for actor in state.of_role("sessions"):
        if not actor.live:
            continue
        for name, (bound, words) in _SHARES.items():
            share, most = actor.gauge(name) or 0.0, getattr(safety, bound)
            if share > most:
                yield finding("live alarm", bound, f"{share:.0%} {words}; live.safety.{bound} = {most:g}")
        drift = actor.gauge("live_length_drift")
        if drift is not None and not 1 / safety.length_drift <= drift <= safety.length_drift:
            words = f"the newest replies are {drift:.2g} times as long as the first ones"
            yield finding("live alarm", "length_drift", f"{words}; live.safety.length_drift = {safety.length_drift:g}")


def _kept(state: RunState) -> Iterator[StallFound]:
    """Data keys that are kept for longer than they shall be, for the clock jumped."""
    for actor in state.of_role(SUPERVISOR):
        if actor.live and (ahead_s := actor.gauge(AHEAD)):
            where = f"{abs(ahead_s) / 3600:,.1f} h {'ahead of' if ahead_s > 0 else 'behind'} the time that is expected"
            words = f"live.retention_days erases nothing: the clock is {where}"
            yield finding("clock off", actor.actor_id, f"{words}; it erases again after a day without a jump")
