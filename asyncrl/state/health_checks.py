"""Faults of machines, processes, streams and engines, whether training advances or not."""

from __future__ import annotations

import os
from collections.abc import Iterator

from asyncrl.config.engine_settings import Capability
from asyncrl.config.pools import purpose_of
from asyncrl.config.stream_capacity import MB, RESERVE_MB, store_limit
from asyncrl.config.tasks import tasks_of
from asyncrl.config.worker_pools import config_of_pool
from asyncrl.engine.errors import LOGITS_NOT_FINITE
from asyncrl.state.findings import finding
from asyncrl.state.records import SILENT_S, Actor, Engine, anomaly_text
from asyncrl.state.run_state import RunState
from asyncrl.training.anomalies import broken_assertions
from topics.actors import Waiting
from topics.roles import SUPERVISOR, pool_of, role_of
from topics.stalls import StallFound

AWAY = "hosts_away_s"  # vital sign of the supervisor: see `Placement.away_s`
SINK_FAILURES = "failing_sink_"  # begins vital signs of the recorder: failures of a sink since it last took rows
UNWRITTEN = "unwritten_errno"  # vital sign of the recorder: why its files take nothing; not there while they do

_SINK_ADVICE = (
    "see `asyncrl logs recorder-1`; the sink continues by itself, `asyncrl export` writes what is missing then"
)
_START_S = 90.0  # for a process to publish its first message
_GONE_S = 2.0  # a process that ended is started again sooner
_OFTEN = 3  # starts within a minute
_CLOCK_S = 3.0
_FULL, _NEARLY_FULL = 0.985, 0.9  # of a stream's bytes
_RECENT_S = 60.0
_RESTART_S = 5.0  # beyond the pause before a restart, in which a process that ended is started again
_SERVER_S = 10.0  # a server that does not answer for this long is dead
_ANSWER_S = 5.0  # within which a server that is well samples, or loads
_UPDATES = 5.0  # an update that takes this many times as long as the previous one is stuck
_FIRST_UPDATE_S = 30.0
_COMPILING_S = 120.0  # after a server on a GPU is ready for the first time: its first requests take up to a minute
_FALLBACKS = 2  # versions from the store, one after another, that should have come directly


def blockers(state: RunState) -> Iterator[StallFound]:
    """Faults of the machine and the server: each alone explains that nothing is trained."""
    for disk in state.disks:
        if disk.free < RESERVE_MB * MB:
            evidence = f"{disk.free // MB:,} of {disk.total // MB:,} MB are free"
            yield finding("disk full", disk.path, evidence)
    if state.denied:
        yield finding("permission missing", "doctor", state.denied)
    if state.unreachable:
        yield finding("server unreachable", state.run, state.unreachable)
    if state.rejected:
        yield finding("weights not finite", "learner", state.rejected)
    yield from _streams(state, _FULL, 2.0)


def faults(state: RunState) -> Iterator[StallFound]:
    """All other independent faults; consequences of other faults are left out."""
    yield from _streams(state, _NEARLY_FULL, _FULL)
    yield from _letters(state)
    ill: set[str] = set()
    for one in _actors(state):
        ill.add(one.object)
        yield one
    yield from _keepers(state, ill)
    for engine_id in [actor.actor_id for actor in state.of_role("engine") if actor.live]:
        if engine_id not in ill:
            yield from _engine(state, engine_id)
    yield from _mislabelled(state)
    yield from _not_direct(state, ill)
    yield from _missing_gpus(state)
    yield from _cluster(state)
    yield from _unwritten(state)
    same = state.unchanged
    if same.base and (same.lineage, same.version) == (state.lineage, state.version):
        evidence = f"all tensors of version {same.version} are those of {same.base}"
        yield finding("weights unchanged", "learner", evidence)
    if state.newest is not None:
        for evidence in broken_assertions(state.config, state.newest.step, state.newest.metrics):
            yield finding("assertion broken", "learner", evidence)
    for step in [step.message for step in state.steps if step.message.anomaly and step.message.stage == "rl"][-1:]:
        yield finding("step anomalous", "learner", anomaly_text(step))


def compiling(state: RunState) -> list[Engine]:
    """Servers on GPUs that may still compile kernels: they neither answer nor sample during that time."""
    new = [one for one in state.engines.values() if one.first_ns and state.since_s(one.first_ns) < _COMPILING_S]
    pools = state.config.engine.pools
    on_gpus = {pool for pool, group in pools.items() if group.can(Capability.GPU)}
    return [one for one in new if pool_of(one.engine_id) in on_gpus or one.engine_id in state.announced]


def _streams(state: RunState, least: float, below: float) -> Iterator[StallFound]:
    for name, fill in state.streams.items():
        if least <= fill.share < below and name not in ("VITALS", "HISTORY"):
            room = f"{fill.bytes / 1e6:,.1f} of {fill.max_bytes / 1e6:,.0f} MB are used"
            yield finding("stream full", name, f"{room} by {fill.messages:,} messages")
    limit = store_limit(state.config.nats)
    used = sum(fill.bytes for name, fill in state.streams.items() if name != "VITALS")
    if limit and least <= used / limit < below:
        room = f"{used / 1e6:,.1f} of {limit / 1e6:,.0f} MB are used"
        yield finding("stream full", "all streams", f"{room} (nats.disk_max_mb = {state.config.nats.disk_max_mb})")


def _letters(state: RunState) -> Iterator[StallFound]:
    recent = [letter for letter in state.letters if state.since_s(letter.time_ns) < _RECENT_S]
    if recent:
        last = recent[-1]
        evidence = (
            f"{state.streams['DEAD'].messages:,} in all; the last {state.since_s(last.time_ns):.0f} s ago, "
            f"{last.topic}: {last.reason}"
        )
        yield finding("dead letters", "DEAD", evidence)


def _actors(state: RunState) -> Iterator[StallFound]:
    begun_ns = [actor.starts[-1] for actor in state.actors.values() if actor.starts]
    waited_s = state.since_s(max([state.opened_ns, state.scaled_ns, *begun_ns]))  # few are started at a time
    for role in dict.fromkeys(role_of(name) for name in state.wanted or state.actors):
        for actor in state.of_role(role):
            yield from _actor(state, actor)
        wanted = len(state.names_of(role)) if state.wanted else 0
        missing = wanted - len(state.of_role(role))
        if missing > 0 and waited_s > _START_S:
            evidence = f"{missing} of {wanted} have not started, and no process has begun for {waited_s:.0f} s"
            yield finding("actor silent", role, evidence)
    for actor in state.actors.values():
        if actor.denied and not actor.starts:  # its login was refused: it has published nothing
            yield finding("permission missing", actor.actor_id, actor.last_error)
    supervisor = state.actors.get("supervisor-1")
    if supervisor is not None:
        yield from _actor(state, supervisor)


def _actor(state: RunState, actor: Actor) -> Iterator[StallFound]:
    """The one thing that is wrong with an actor, the deepest first."""
    words = actor.last_error if state.since_s(actor.stopped_ns) < _RECENT_S else ""
    denied = actor.vitals.denied if actor.vitals is not None else ""
    if denied or (words and actor.denied):
        yield finding("permission missing", actor.actor_id, denied or words)
        return
    dead = _dead(state, actor, words)
    if dead is not None:
        yield dead
        return
    if actor.live:
        yield from _alive(state, actor)


def _alive(state: RunState, actor: Actor) -> Iterator[StallFound]:
    silent_s = state.since_s(actor.since_ns)
    frozen = actor.process == "stopped" or (actor.process == "gone" and silent_s > _GONE_S)
    if frozen or silent_s > SILENT_S:
        process = f"process {actor.pid} on {actor.host} is {actor.process or 'silent: it is frozen, or its machine is'}"
        evidence = f"no vital sign for {silent_s:.0f} s; {process}"
        asked = _asked_of_learner(state) if actor.role == "learner" else ""
        if asked:
            yield finding("learner behind", actor.actor_id, f"{asked}; {evidence}")
        else:
            yield finding("actor silent", actor.actor_id, evidence)
        return
    if actor.vitals is not None and abs(skew_s := actor.vitals.at_s - actor.seen_ns / 1e9) > _CLOCK_S:
        evidence = (
            f"the clock of {actor.host} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
        )
        yield finding("clock off", actor.actor_id, evidence)


def _dead(state: RunState, actor: Actor, words: str) -> StallFound | None:
    """Return the finding for an actor that starts again and again, or was not started again.

    Args:
        words: its last error, if that is recent.
    """
    quick = actor.quick_starts(state.now_ns, state.opened_ns)
    down_s = 0.0 if actor.live else state.since_s(actor.stopped_ns)
    left = words and down_s > state.config.supervision.restart_pause_s + _RESTART_S
    failed = _failed_version(state, actor) if words and not actor.live else ""
    diverged = LOGITS_NOT_FINITE in words
    if not (quick >= _OFTEN or left or failed or diverged):
        return None
    ended = f"it ended {down_s:.0f} s ago{' and was not started again' if left else ''}"
    what = f"started {quick} times in the last minute" if quick >= _OFTEN else ended
    evidence = f"{what}; {f'last error: {words}' if words else 'it left no error message: it was killed'}"
    if diverged:
        return finding("weights not finite", actor.actor_id, evidence)
    if failed := failed or _failed_version(state, actor):
        return finding("version not loaded", actor.actor_id, f"{failed}; {evidence}")
    return finding("engine dead" if actor.role == "engine" else "actor dying", actor.actor_id, evidence)


def _asked_of_learner(state: RunState) -> str:
    """Return what the run waits for from the learner."""
    if state.packed is not None and state.packed > state.trained:
        return f"batch {state.trained + 1} is packed and waits for it"
    return f"version {state.owed} is trained and not published" if state.owed is not None else ""


def _keepers(state: RunState, ill: set[str]) -> Iterator[StallFound]:
    """Check that a keeper's log grows: a writer appends a heartbeat every few seconds."""
    for stream, role in [(stream.name, stream.keeper) for stream in state.tables.streams if stream.keeper]:
        fill, actors = state.streams.get(stream), state.of_role(role)
        if fill is None or any(actor.actor_id in ill for actor in actors):
            continue
        starts = [actor.starts[-1] for actor in actors if actor.live]
        newest = max([fill.last_ns, state.opened_ns, *starts])
        quiet_s = state.since_s(newest)
        if starts and quiet_s > state.config.supervision.silence_s + SILENT_S:
            evidence = f"no writer has appended to {stream} for {quiet_s:.0f} s; a {role} appends at least every 3 s"
            yield finding("no writer", role, evidence)


def _engine(state: RunState, engine_id: str) -> Iterator[StallFound]:
    """Return the faults of an inference server whose actor is healthy."""
    actor, engine = state.actors[engine_id], state.engines.get(engine_id, Engine(engine_id))
    updating = engine.state == "updating" and engine.updating_ns > actor.starts[-1]
    bound_s = max(_SERVER_S, _UPDATES * engine.update_s) if updating else _SERVER_S
    bound_s = _COMPILING_S if engine in compiling(state) else bound_s
    silent_s = actor.ago_s("answered_at_s")
    left = engine.state == "gone" and engine.gone_ns > actor.starts[-1]
    if left and engine.asked:
        return  # it was asked to leave: one that is restarted comes back, one that is not wanted is not looked at
    if silent_s > bound_s or left:
        text = f"the server at {engine.address or 'its address'} has not answered for {silent_s:.0f} s"
        yield finding("engine dead", engine_id, text if silent_s > bound_s else f"it is gone: {engine.reason}")
        return
    stuck_s = actor.ago_s("moved_at_s")
    asks = Waiting("engine", engine_id)
    waits = [work for _, work in state.held("rollout") if work.waiting == asks and work.quiet_s > _ANSWER_S]
    if stuck_s > bound_s and waits and not updating:
        evidence = (
            f"the server at {engine.address} answers, holds {actor.gauge('requests') or 0:.0f} requests and has "
            f"sampled no token for {stuck_s:.0f} s; {waits[0].id} has waited for {waits[0].quiet_s:.0f} s"
        )
        yield finding("engine paused", engine_id, evidence)
        return
    yield from _outdated(state, actor, engine)


def _outdated(state: RunState, actor: Actor, engine: Engine) -> Iterator[StallFound]:
    """Return the finding for an engine that should have had a version for some time."""
    if state.config.placement.colocate == "time_slice" and engine.state == "updating":
        return  # the learner has the GPU, or the update has its own deadline
    if purpose_of(state.config, engine.engine_id) != "training":
        return  # it holds the versions of evaluations, which end by their deadline and say why, or of a channel
    began_ns = actor.starts[-1]
    if max(engine.ready_ns, engine.updating_ns) < began_ns:
        return  # its server starts
    loaded = engine.version if engine.ready_ns > began_ns else None
    late_s = state.since_s(max(state.published_ns, engine.updating_ns if loaded is None else began_ns))
    patient_s = max(_ANSWER_S, _UPDATES * engine.update_s) if engine.update_s else _FIRST_UPDATE_S
    if state.version is not None and loaded != state.version and late_s > patient_s:
        has = "none" if loaded is None else f"version {loaded}"
        evidence = f"it should have had version {state.version} {late_s:.0f} s ago; it has {has} ({engine.state})"
        yield finding("version not loaded", engine.engine_id, evidence)


def _mislabelled(state: RunState) -> Iterator[StallFound]:
    """Find servers whose weights another client changed in the last minute, by their actors or rollout workers."""
    mislabelled = [engine for engine in state.engines.values() if engine.found]
    mislabelled = [engine for engine in mislabelled if state.since_s(engine.found_ns) < _RECENT_S]
    for engine in mislabelled:
        evidence = (
            f"{state.since_s(engine.found_ns):.0f} s ago the server at {engine.address} had weights called "
            f"{engine.found!r}, which this run did not give it: it was restarted, or another client loads weights"
        )
        yield finding("mislabelled", engine.engine_id, evidence)
    for worker in [] if mislabelled else state.of_role("rollout"):
        if worker.gauge("mislabelled_at_s") is not None and (ago_s := worker.ago_s("mislabelled_at_s")) < _RECENT_S:
            evidence = (
                f"an engine sampled with other weights than it reports, {ago_s:.0f} s ago; "
                f"{worker.gauge('mislabelled_tokens') or 0:,.0f} tokens were thrown away"
            )
            yield finding("mislabelled", worker.actor_id, evidence)


def _not_direct(state: RunState, ill: set[str]) -> Iterator[StallFound]:
    """Find engines that repeatedly read the store although `weights.transport` is set."""
    for engine in state.engines.values():
        if engine.fallbacks >= _FALLBACKS and engine.state != "gone" and engine.engine_id not in ill:
            settings = state.config.weights
            evidence = (
                f"{engine.fallbacks} versions one after another, the last {engine.version}, did not come by "
                f'weights.transport = "{settings.transport}": {engine.fallback}; it reads them from the store '
                f'("{settings.store}") instead, the last in {engine.update_s:.2f} s'
            )
            yield finding("weights not direct", engine.engine_id, evidence)


def _missing_gpus(state: RunState) -> Iterator[StallFound]:
    settings = state.config.learner
    for actor in state.of_role("learner"):
        if actor.live and (missing := actor.gauge("ranks_missing")):
            evidence = f"{missing:.0f} of {settings.ranks} ranks did not start within {settings.elastic_s:.0f} s"
            yield finding("cards missing", actor.actor_id, f"{evidence}; the others train")


def _cluster(state: RunState) -> Iterator[StallFound]:
    """The head of a Ray cluster, without which no process of the run starts, and all end after a while."""
    for actor in state.of_role(SUPERVISOR):
        if actor.live and (away_s := actor.gauge(AWAY)):
            where = state.config.placement.address or "of this machine"
            evidence = (
                f"the head of the Ray cluster {where} has not answered for {away_s:.0f} s; actors work on until Ray"
            )
            yield finding("cluster away", actor.actor_id, f"{evidence} ends them, after 60 s by default")


def _unwritten(state: RunState) -> Iterator[StallFound]:
    for actor in state.of_role("recorder"):
        if actor.live and (number := actor.gauge(UNWRITTEN)):
            evidence = f"metrics.jsonl, samples.jsonl and summary.json take nothing: {os.strerror(int(number))}"
            yield finding("metrics unwritten", actor.actor_id, f"{evidence}; the run continues without them")
        values = actor.vitals.values if actor.live and actor.vitals else {}
        for name in [name for name in values if name.startswith(SINK_FAILURES)]:
            sink = name.removeprefix(SINK_FAILURES)
            evidence = f"sink {sink} failed {values[name]:.0f} times in a row; the run continues without it"
            yield StallFound("metrics unwritten", actor.actor_id, evidence, _SINK_ADVICE)


def _failed_version(state: RunState, actor: Actor) -> str:
    """The version that repeatedly ends an engine, if any."""
    engine = state.engines.get(actor.actor_id)
    if engine is None or max(engine.updating_ns, engine.refused_ns) <= engine.ready_ns:
        return ""
    wanted = engine.refused if engine.refused_ns > engine.updating_ns else engine.updating
    has = "none before" if engine.version is None else f"version {engine.version} before"
    return f"it does not take version {wanted}, it had {has}"


GRADERS = ("reward", "groupreward")  # roles that grade: single trajectories, and whole groups


def hanging_rewards(state: RunState, ill: set[str], *, held_s: float) -> Iterator[StallFound]:
    """Trajectories, or groups, that are being graded for too long, one for each worker.

    Args:
        ill: actors whose reports are old.
        held_s: seconds without progress after which work hangs while nothing is trained.
    """
    for role in GRADERS:
        seen: set[str] = set()
        for actor, work in state.held(role):
            if actor.actor_id in ill | seen or work.quiet_s < held_s or work.waiting.on == "turn":
                continue
            seen.add(actor.actor_id)
            done = int((actor.gauge("graded") or 0) + (actor.gauge("failed") or 0))
            pool = pool_of(actor.actor_id)
            queue, limits = state.queues.get(pool, {}), config_of_pool(state.config, pool).reward
            limit = f"reward.time_limit_s is {limits.time_limit_s:g}"
            if role == "groupreward" and any(task.tournament for task in tasks_of(state.config).values()):
                limit = f"reward.tournament_limit_s is {limits.tournament_limit_s:g}"
            evidence = (
                f"grades {work.id}, which it has had for {work.held_s:.0f} s, {done:,} done before; "
                f"{pool} workers have {queue.get('under_way', 0):,}, {queue.get('waiting', 0):,} more wait; {limit}"
            )
            yield finding("reward hanging", actor.actor_id, evidence)


def failing_rewards(state: RunState) -> Iterator[StallFound]:
    """Groups that ended because their rewards failed, since the newest batch."""
    failed, groups = state.failed.new.get("reward", 0), state.drops.get("failed", 0)
    if failed and groups:
        of_groups = all(task.reward_scope == "group" for task in tasks_of(state.config).values())
        evidence = (
            f"{failed:,} trajectories got no reward since the last batch, and {groups:,} groups ended with that; "
            f"the last failure: {state.failed.last}"
        )
        yield finding("reward failing", "groupreward" if of_groups else "reward", evidence)
