"""Faults in themselves, whether training advances or not: machines, processes, streams, engines."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.room import MB, RESERVE_MB
from asyncrl.state.findings import Finding
from asyncrl.state.picture import Actor, Engine, Picture
from topics.engines import ENGINE_STOPPED

_SILENT_S = 6.0  # three vital signs
_START_S = 90.0  # for a process to publish its first message
_GONE_S = 2.0  # a process that ended is started again sooner
_OFTEN = 3  # starts within a minute
_CLOCK_S = 3.0
_FULL, _NEARLY_FULL = 0.985, 0.9  # of a stream's bytes
_RECENT_S = 60.0
_LATELY_S = 15.0
_ANSWER_S = 5.0  # a server that does not answer for this long is dead
_UPDATES = 5.0  # an update that takes so many times as long as the one before is none
_FIRST_UPDATE_S = 30.0


def faults(picture: Picture) -> Iterator[Finding]:
    """Everything that is wrong by itself; what merely follows from something else is left out."""
    outer = [*_machine(picture), *_streams(picture)]
    yield from outer
    if any(finding.blocks for finding in outer) or not picture.opened_ns:
        return
    yield from _letters(picture)
    ill: set[str] = set()
    for finding in _actors(picture):
        ill.add(finding.object)
        yield finding
    yield from _keepers(picture, ill)
    for engine_id in [actor.actor_id for actor in picture.of_role("engine") if actor.live]:
        if engine_id not in ill:
            yield from _engine(picture, engine_id)
    yield from _mislabelled(picture)


def _machine(picture: Picture) -> Iterator[Finding]:
    for disk in picture.disks:
        if disk.free < RESERVE_MB * MB:
            evidence = f"{disk.free // MB:,} of {disk.total // MB:,} MB are free"
            yield Finding("disk full", disk.path, evidence, blocks=True)
    if picture.denied:
        yield Finding("permission missing", "doctor", picture.denied, blocks=True)
    if picture.unreachable:
        yield Finding("server unreachable", picture.run, picture.unreachable, blocks=True)


def _streams(picture: Picture) -> Iterator[Finding]:
    for name, state in picture.streams.items():
        share = state["bytes"] / state["max_bytes"] if state["max_bytes"] > 0 else 0.0
        if share >= _NEARLY_FULL and name != "VITALS":
            room = f"{state['bytes'] / 1e6:,.1f} of {state['max_bytes'] / 1e6:,.0f} MB are taken"
            evidence = f"{room} by {state['messages']:,} messages"
            yield Finding("stream full", name, evidence, blocks=share >= _FULL)


def _letters(picture: Picture) -> Iterator[Finding]:
    recent = [letter for letter in picture.letters if picture.since_s(letter.time_ns) < _RECENT_S]
    if recent:
        last = recent[-1]
        evidence = (
            f"{picture.streams['DEAD']['messages']:,} in all; the last {picture.since_s(last.time_ns):.0f} s ago, "
            f"{last.topic}: {last.reason}"
        )
        yield Finding("dead letters", "DEAD", evidence)


def _actors(picture: Picture) -> Iterator[Finding]:
    for role in picture.wanted or {actor.role: 1 for actor in picture.actors.values()}:
        for actor in picture.of_role(role):
            yield from _actor(picture, actor)
        missing = picture.wanted.get(role, 0) - len(picture.of_role(role))
        waited_s = picture.since_s(max(picture.opened_ns, picture.scaled_ns))
        if missing > 0 and waited_s > _START_S:
            evidence = f"{missing} of {picture.wanted[role]} never started, {waited_s:.0f} s after they were asked for"
            yield Finding("actor silent", role, evidence)
    supervisor = picture.actors.get("supervisor-1")
    if supervisor is not None:
        yield from _actor(picture, supervisor)


def _actor(picture: Picture, actor: Actor) -> Iterator[Finding]:
    """The one thing that is wrong with an actor, the deepest first."""
    words = actor.last_error if picture.since_s(actor.stopped_ns) < _RECENT_S else ""
    denied = actor.vitals.denied if actor.vitals is not None else ""
    if denied or (words and actor.denied):
        yield Finding("permission missing", actor.actor_id, denied or words)
        return
    quick, silent_s = actor.quick_starts(picture.now_ns, picture.opened_ns), picture.since_s(actor.since_ns)
    ended_s = picture.since_s(actor.stopped_ns)
    if quick >= _OFTEN or (words and (not actor.live or (quick > 1 and ended_s < _LATELY_S))):
        text = f"last error: {words}" if words else "it left no error message: it was killed"
        evidence = f"started {quick} times in the last minute; {text}"
        failed = _failed_version(picture, actor)
        if failed:
            yield Finding("version not loaded", actor.actor_id, f"{failed}; {evidence}")
        else:
            yield Finding("engine dead" if actor.role == "engine" else "actor dying", actor.actor_id, evidence)
        return
    if not actor.live:
        return
    frozen = actor.process == "stopped" or (actor.process == "gone" and silent_s > _GONE_S)
    if frozen or silent_s > _SILENT_S:
        state = f"process {actor.pid} on {actor.host} is {actor.process or 'silent: frozen, or its machine is'}"
        evidence = f"no vital sign for {silent_s:.0f} s; {state}"
        if actor.role == "learner" and picture.packed is not None and picture.packed > picture.trained:
            evidence = f"batch {picture.trained + 1} is packed and waits for it; {evidence}"
            yield Finding("learner behind", actor.actor_id, evidence)
        else:
            yield Finding("actor silent", actor.actor_id, evidence)
        return
    if actor.vitals is not None and abs(skew_s := actor.vitals.at_s - actor.seen_ns / 1e9) > _CLOCK_S:
        evidence = (
            f"the clock of {actor.host} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
        )
        yield Finding("clock off", actor.actor_id, evidence)


def _keepers(picture: Picture, ill: set[str]) -> Iterator[Finding]:
    """Check that a keeper's log grows: a writer appends a heartbeat every few seconds."""
    for stream, role in (
        ("PROMPTS", "prompter"),
        ("BATCHES", "buffer"),
        ("TRAINING", "learner"),
        ("FLEET", "supervisor"),
    ):
        state, actors = picture.streams.get(stream), picture.of_role(role)
        if state is None or any(actor.actor_id in ill for actor in actors):
            continue
        starts = [actor.starts[-1] for actor in actors if actor.live]
        newest = max([state.get("last_ns", 0), picture.opened_ns, *starts])
        quiet_s = picture.since_s(newest)
        if starts and quiet_s > picture.config.keepers.lease_s + _SILENT_S:
            evidence = f"no writer has appended to {stream} for {quiet_s:.0f} s; a {role} writes every 3 s"
            yield Finding("no writer", role, evidence)


def _engine(picture: Picture, engine_id: str) -> Iterator[Finding]:
    """Return the faults of an inference server whose actor is healthy."""
    actor, engine = picture.actors[engine_id], picture.engines.get(engine_id, Engine(engine_id))
    updating = engine.state == "updating" and engine.updating_ns > actor.starts[-1]
    bound_s = max(_ANSWER_S, _UPDATES * engine.update_s) if updating else _ANSWER_S
    silent_s = actor.ago_s("answered_at_s")
    left = engine.state == "gone" and engine.gone_ns > actor.starts[-1]
    if left and engine.reason == ENGINE_STOPPED:
        return  # it was asked to leave: one that is restarted comes back, one that is not wanted is not looked at
    if silent_s > bound_s or left:
        text = f"the server at {engine.address or 'its address'} has not answered for {silent_s:.0f} s"
        yield Finding("engine dead", engine_id, text if silent_s > bound_s else f"it is gone: {engine.reason}")
        return
    stuck_s = actor.ago_s("moved_at_s")
    waits = [work for _, work in picture.held("rollout") if work.place == engine_id and work.quiet_s > _ANSWER_S]
    if stuck_s > _ANSWER_S and waits and not updating:
        evidence = (
            f"the server at {engine.address} answers, holds {actor.gauge('requests') or 0:.0f} requests and has "
            f"sampled no token for {stuck_s:.0f} s; {waits[0].id} waits for {waits[0].quiet_s:.0f} s"
        )
        yield Finding("engine paused", engine_id, evidence)
        return
    began_ns = actor.starts[-1]
    if max(engine.ready_ns, engine.updating_ns) < began_ns:
        return  # its server starts
    loaded = engine.version if engine.ready_ns > began_ns else None
    late_s = picture.since_s(max(picture.published_ns, engine.updating_ns if loaded is None else began_ns))
    patient_s = max(_ANSWER_S, _UPDATES * engine.update_s) if engine.update_s else _FIRST_UPDATE_S
    if picture.published is not None and loaded != picture.published and late_s > patient_s:
        has = "none" if loaded is None else f"version {loaded}"
        evidence = f"it should have version {picture.published} for {late_s:.0f} s; it has {has} ({engine.state})"
        yield Finding("version not loaded", engine_id, evidence)


def _mislabelled(picture: Picture) -> Iterator[Finding]:
    """Find servers whose weights another client changed in the last minute, by their actors or rollout workers."""
    mislabelled = [engine for engine in picture.engines.values() if engine.found]
    mislabelled = [engine for engine in mislabelled if picture.since_s(engine.found_ns) < _RECENT_S]
    for engine in mislabelled:
        evidence = (
            f"{picture.since_s(engine.found_ns):.0f} s ago the server at {engine.address} had weights called "
            f"{engine.found!r}, which this run did not give it: it was restarted, or another client loads weights"
        )
        yield Finding("mislabelled", engine.engine_id, evidence)
    for worker in [] if mislabelled else picture.of_role("rollout"):
        if worker.gauge("mislabelled_at_s") is not None and (ago_s := worker.ago_s("mislabelled_at_s")) < _RECENT_S:
            evidence = (
                f"an engine sampled with other weights than it reports, {ago_s:.0f} s ago; "
                f"{worker.gauge('mislabelled_tokens') or 0:,.0f} tokens were thrown away"
            )
            yield Finding("mislabelled", worker.actor_id, evidence)


def _failed_version(picture: Picture, actor: Actor) -> str:
    """The version over which an engine dies again and again, where it is one."""
    engine = picture.engines.get(actor.actor_id)
    if engine is None or engine.updating is None or engine.updating_ns <= engine.ready_ns:
        return ""
    has = "none before" if engine.version is None else f"version {engine.version} before"
    return f"it does not take version {engine.updating}, it had {has}"
