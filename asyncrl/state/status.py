"""The state of a run as one message, for `asyncrl status --json`, exporters and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal

import msgspec

from asyncrl.state.autoscale import held
from asyncrl.state.loads import pool_loads
from asyncrl.state.records import Actor, Event, Scaling
from asyncrl.state.run_state import RunState
from asyncrl.telemetry.metric_names import MAIN, named
from topics.roles import pool_of
from topics.runs import (
    ActorStatus,
    EngineStatus,
    EvalStatus,
    PoolStatus,
    RunEvent,
    RunMoment,
    RunStatus,
    ScalingStatus,
    StreamStatus,
)

EVENTS = 64
_SILENT_S = 10.0  # an actor without vital signs for this long is shown as silent
_GAUGES = ("gpu_share", "gpu_memory_share", "cache_share", "cache_hit_share")  # vital signs whose means a pool has
_POINTS = 200  # of the curve of rewards
_EVALS = 32


def run_status(state: RunState, now_ns: int, events: Iterable[Event] = ()) -> RunStatus:
    """Return the state at a time of the server's clock, with events."""
    newest, mean_lag = state.newest, state.mean_lag
    engines = [engine for _, engine in sorted(state.engines.items()) if engine.state != "gone"]
    actors = [_actor(actor, now_ns) for actor in state.fleet]
    return RunStatus(
        run=state.run,
        at_s=now_ns / 1e9,
        state="paused" if state.phase == "running" and state.paused_by is not None else state.phase,
        failure=state.failure,
        elapsed_s=round((now_ns - state.first_ns) / 1e9, 1) if state.first_ns else 0.0,
        stage=newest.stage if newest is not None else None,
        step=newest.step if newest is not None else None,
        steps=state.total,
        warmup_steps=state.warmup_steps,
        version=state.version,
        lineage=state.lineage,
        checkpoint_step=state.checkpoint,
        reward=state.rewards[-1] if state.rewards else None,
        rewards=[round(mean, 4) for mean in curve(state.rewards, _POINTS)],
        metrics=_metrics(state),
        mean_lag_versions=round(mean_lag, 4) if mean_lag is not None else None,
        recent_tokens_by_lag=state.lags,
        per_s={name: round(rate, 3) for name, rate in state.rates().items()},
        evals=_evals(state),
        queues=state.queues,
        streams={
            name: StreamStatus(fill.bytes, fill.max_bytes, round(fill.share, 4))
            for name, fill in state.payloads.items()
        },
        trims=state.trims,
        trimmed_bytes=state.trimmed_bytes,
        admission_paused=state.paused,
        open_groups=state.gauge("prompter", "open_groups"),
        ready_groups=state.gauge("buffer", "ready_groups"),
        groups_dropped=state.drops,
        engines=[EngineStatus(engine.engine_id, engine.state, engine.shown, engine.update_s) for engine in engines],
        wanted=state.pools,
        scalings=_scalings(state, now_ns),
        autoscale_fault=state.autoscale_fault if state.config.autoscale.function else "",
        actors=actors,
        stalls=list(state.stalls.values()),
        judge_agreement=None if (share := state.gauge("sessions", "live_disagreement")) is None else 1 - share,
        trajectories_failed=state.failed.count,
        last_failure=state.failed.last,
        messages_unreadable=state.dead.count,
        last_unreadable=state.dead.last,
        events=[RunEvent(event.kind, event.time_ns / 1e9, event.text) for event in events],
        alerts=list(state.alerts.values()),
        pools=_pools(actors),
        profiles=state.profiles,
    )


def shortened(status: RunStatus, most: int) -> RunStatus:
    """Return the state with at most this many actors and engines, from all pools equally."""
    seen, rank = Counter[str](), dict[str, int]()
    for actor in status.actors:
        pool = pool_of(actor.actor_id)
        rank[actor.actor_id], seen[pool] = seen[pool], seen[pool] + 1
    listed = {actor.actor_id for actor in sorted(status.actors, key=lambda one: rank[one.actor_id])[:most]}
    actors = [actor for actor in status.actors if actor.actor_id in listed]
    return msgspec.structs.replace(status, actors=actors, engines=status.engines[:most])


def run_moment(status: RunStatus, every: Literal["1s", "10s", "60s"]) -> RunMoment:
    """Return a state without names of actors.

    Args:
        every: time between two such moments.
    """
    return RunMoment(
        every=every,
        at_s=status.at_s,
        state=status.state,
        step=status.step,
        version=status.version,
        metrics={name: status.metrics[name] for name in MAIN if name in status.metrics},
        per_s=status.per_s,
        waiting={name: queue["waiting"] for name, queue in status.queues.items()},
        under_way={name: queue["under_way"] for name, queue in status.queues.items()},
        stream_shares={name: stream.share for name, stream in status.streams.items()},
        open_groups=status.open_groups,
        ready_groups=status.ready_groups,
        wanted=status.wanted,
        live={name: pool.live for name, pool in status.pools.items()},
        cores={name: pool.cores for name, pool in status.pools.items()},
        gauges={name: pool.gauges for name, pool in status.pools.items() if pool.gauges},
        engines=dict(Counter(engine.state for engine in status.engines)),
        stalls=[f"{stall.cause}: {stall.object}" for stall in status.stalls],
    )


def _evals(state: RunState) -> list[EvalStatus]:
    evals = state.evals if len(state.evals) <= _EVALS else [state.evals[0], *state.evals[1 - _EVALS :]]
    return [EvalStatus(scored.version, scored.accuracy) for scored in evals]


def _scalings(state: RunState, now_ns: int) -> list[ScalingStatus]:
    """Each pool that was scaled, or that the rule scales, with its newest change."""
    settings, loads, found = state.config.autoscale, pool_loads(state), []
    for pool in dict.fromkeys([*settings.pools, *state.scalings]):
        count, last = state.wanted.get(pool, 0), state.scalings.get(pool)
        ruled = pool in settings.pools and pool in loads
        why = held(settings, pool, loads[pool], last, now_ns / 1e9) if ruled else ""
        change = last or Scaling(count, count, "", "", 0)
        at_s = change.time_ns / 1e9 if last is not None else None
        found.append(ScalingStatus(pool, change.before, change.after, change.by, change.reason, at_s, why))
    return found


def _actor(actor: Actor, now_ns: int) -> ActorStatus:
    return ActorStatus(
        actor_id=actor.actor_id,
        role=actor.role,
        host=actor.host,
        pid=actor.pid,
        live=actor.live,
        restarts=actor.restarts,
        last_error=actor.error,
        silent_s=round(max(0, now_ns - actor.seen_ns) / 1e9, 1) if actor.seen_ns else None,
        vitals=actor.vitals.values if actor.vitals is not None else {},
    )


def _metrics(state: RunState) -> dict[str, float]:
    """Return the metrics of the newest step under the names of `metrics.jsonl`."""
    found = named(state.metrics)
    if (newest := state.newest) is not None and newest.stage == "rl":
        found |= {"reward/mean": newest.rewards[0], "reward/std": newest.rewards[1]}
        if tokens := sum(newest.lags.values()):
            found["lag/mean"] = round(sum(lag * count for lag, count in newest.lags.items()) / tokens, 4)
        if (rate := state.rates().get("trained_tokens")) is not None:
            found["throughput/tokens_per_s"] = round(rate, 1)
    return found


def _pools(actors: Sequence[ActorStatus]) -> dict[str, PoolStatus]:
    found: dict[str, PoolStatus] = {}
    for name in dict.fromkeys(pool_of(actor.actor_id) for actor in actors):
        own = [actor for actor in actors if pool_of(actor.actor_id) == name]
        live = [actor for actor in own if actor.live]
        gauges = {gauge: [actor.vitals[gauge] for actor in live if gauge in actor.vitals] for gauge in _GAUGES}
        found[name] = PoolStatus(
            live=len(live),
            cores=round(sum(actor.vitals.get("cpu_share", 0.0) for actor in live), 3),
            silent=sum(actor.silent_s is not None and actor.silent_s > _SILENT_S for actor in live),
            restarts=sum(actor.restarts for actor in own),
            last_error=next((actor.last_error for actor in own if actor.last_error), ""),
            gauges={gauge: round(fmean(values), 4) for gauge, values in gauges.items() if values},
        )
    return found


def curve(values: Sequence[float], points: int) -> list[float]:
    """Return the means of at most this many stretches of equal length."""
    cells = min(points, len(values))
    bounds = [len(values) * cell // cells for cell in range(cells + 1)] if cells else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
