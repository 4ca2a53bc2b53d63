"""Diagnose a run from its state: a pure function that names causes, and not their consequences.

Some facts are wrong by themselves, with or without progress of the training. Why nothing is trained is then asked along
the way of a batch, backwards: the learner waits for a batch, the buffer for groups, groups for their members, members
for rewards, functions and engines, and all of them for the prompter's credit.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from asyncrl.config.tasks import group_size_of, tasks_of
from asyncrl.state.findings import BESIDE, finding
from asyncrl.state.health_checks import GRADERS, blockers, compiling, failing_rewards, faults, hanging_rewards
from asyncrl.state.live_facts import live_faults
from asyncrl.state.loads import queued
from asyncrl.state.open_alerts import PAUSED
from asyncrl.state.records import Actor, Engine, counted
from asyncrl.state.run_state import RunState
from asyncrl.state.sandbox_checks import pool_faults
from topics.actors import Activity, HeldWork, Waiting
from topics.ids import prompt_of
from topics.roles import pool_of, role_of
from topics.stalls import StallFound

_LEAST_S = 5.0  # silence shorter than this is no stall
_STEPS = 3.0  # nor is one shorter than this many steps
_FIRST_S = 10.0  # before there is a pace to compare with
_FEW_STEPS = 4  # of a stage, which make no pace
_PACE_STEPS = 8  # the newest, from which a pace is taken
_LOADING_S = 120.0  # for a learner to load its model, or to save it
_HELD_S = 4.0  # work that has come no further for this long, while nothing is trained, hangs
_GPU_S = 30.0  # for engines to leave a GPU
_REQUEST_S = 15.0  # and so does a request to an engine that is well otherwise
_MOVES_S = 2.0  # an actor with progress so recent is advancing
_BRIEF = 4  # groups that are few enough to be called stragglers
_UNEXPLAINED_S = 60.0
_FIRST_STEP_S = 600.0  # that the first steps may take while work advances
_SLOW_ROW_S = 1.0  # a row that takes less does not hold up a run whose groups are dropped
_PREPARED = Waiting("tool", "sandbox")  # its start and its setup have their own limits
_WAITING = {
    "function": "in the rollout function",
    "engine": "{name}",
    "retry": "{name} after {fault}",
    "version": "an engine with version {version}",
    "tool": "tool {name}",
    "reward": "its reward",
    "evaluation": "answers and their rewards",
    "publish": "a publish",
    "turn": "its turn",
    "isolated": "in a separate process",
}
_ACTIVITIES = {
    "": "has not reported its activity",
    "loading": "has been loading the model",
    "training": "has been training batch {number}",
    "publishing": "has been copying version {number}",
    "saving": "has been copying checkpoint {number}",
    "awaiting batch": "has waited for batch {number}",
    "awaiting teacher": "has waited for the teacher's log-probs of batch {number}",
    "awaiting card": "has waited for the GPU in turn {number}",
    "standby": "has been on standby",
    "taking over": "has been taking over",
}


def diagnose(state: RunState) -> list[StallFound]:
    """Everything that keeps a run from advancing, root causes only.

    Args:
        state: of the run at one moment; its `now_ns` is the time of the diagnosis.

    Returns:
        Findings, in the order in which to look at them; none for a run that is well, or over.
    """
    found = list(blockers(state))
    ending = state.finished or state.stop_requested  # then processes and servers leave one after the other
    if found or ending or not state.opened_ns:
        return found
    if (alert := state.paused_by) is not None:
        return [finding(PAUSED, alert.alert, f"raised at step {alert.step}: {alert.when}")]
    found += [*faults(state), *live_faults(state), *_empty_pools(state), *pool_faults(state)]
    awaited = state.version is not None and _servers_start(state)  # the warm-up needs no engines
    if stalled_s(state) > patience_s(state) and not (awaited or _compiles(state)):
        found += _stall(state, found)
    return found


def stalled_s(state: RunState) -> float:
    """Return the seconds since a batch was trained, or since all actors were there to train the first one."""
    newest = state.steps[-1].time_ns if state.steps else 0
    if newest < state.opened_ns:  # nothing was trained since the run was opened
        newest = max([state.opened_ns, *(actor.starts[-1] for actor in state.actors.values() if actor.starts)])
    return state.since_s(newest)


def patience_s(state: RunState) -> float:
    """Seconds without a step that are no stall at the pace this run had."""
    pace_s = _pace_s(state)
    return _FIRST_S if pace_s is None else max(_LEAST_S, _STEPS * pace_s)


def _pace_s(state: RunState) -> float | None:
    """Seconds between two steps of the stage that the run is in; None as long as it has done few of them."""
    warm = state.trained < 0
    recent = [step for step in state.steps[-_PACE_STEPS:] if step.time_ns >= state.opened_ns]
    steps = [step for step in recent if (step.message.stage == "warmup") is warm]
    if len(steps) <= _FEW_STEPS:
        return None
    return statistics.median((after.time_ns - before.time_ns) / 1e9 for before, after in pairwise(steps))


def _stall(state: RunState, known: list[StallFound]) -> list[StallFound]:
    if state.trained >= state.total or not state.config.trains:
        return []
    if state.packed is not None and state.packed > state.trained:
        return [] if _explains(known, "learner") else list(_learner(state))
    if any(actor.doing.kind in ("loading", "awaiting card") for actor in state.of_role("learner")[:1]):
        return list(_learner(state))
    if _starts(state) or _explains(known, "buffer", "prompter"):
        return []
    ill = {one.object for one in known}
    found = [
        *_idle(state, ill),
        *hanging_rewards(state, ill, held_s=_HELD_S),
        *failing_rewards(state),
        *_rollout(state, ill | {engine.engine_id for engine in compiling(state)}),
        *(() if _explains(known, "engine") else _version(state, ill)),
    ]
    explained = found or any(one.cause not in BESIDE for one in known)
    return found if explained or _recovers(state) else list(_credit(state))


def _starts(state: RunState) -> bool:
    """Return whether a run that was just opened may still take its time before the first step."""
    return not any(step.time_ns > state.opened_ns for step in state.steps) and _servers_start(state)


def _servers_start(state: RunState) -> bool:
    """Return whether the inference servers of a run that was just opened may still take their time."""
    ready = any(engine.ready_ns > state.opened_ns for engine in state.engines.values())
    awaited = bool(state.names_of("engine")) and not ready  # a resumed run may have been scaled to none
    return awaited and state.since_s(state.opened_ns) < state.config.engine.start_deadline_s


def _compiles(state: RunState) -> bool:
    """Return whether nothing was trained since a server may compile its kernels."""
    trained_ns = max((step.time_ns for step in state.steps if step.message.stage == "rl"), default=0)
    return any(engine.first_ns > trained_ns for engine in compiling(state))


def _explains(known: list[StallFound], *roles: str) -> bool:
    return any(role_of(one.object) in roles for one in known)


def _recovers(state: RunState) -> bool:
    """Return whether a worker or engine was started so recently that earlier work may still be on lease."""
    lease_s = state.config.workers.lease_s + _LEAST_S
    workers = [actor for role in ("rollout", *GRADERS, "engine") for actor in state.of_role(role)]
    return any(actor.starts and state.since_s(actor.starts[-1]) < lease_s for actor in workers)


def _held(state: RunState, role: str, ill: set[str]) -> list[tuple[Actor, HeldWork]]:
    """Return the held work of healthy workers that has been waiting for seconds: reports of others are old."""
    return [(actor, work) for actor, work in state.held(role) if actor.actor_id not in ill]


def _learner(state: RunState) -> Iterator[StallFound]:
    """A batch waits for the learner: is it slow?"""
    slowest_s = max((step.message.metrics.get("train_s", 0.0) for step in state.steps), default=0.0)
    for actor in state.of_role("learner")[:1]:
        doing, busy_s = actor.doing, actor.gauge("doing_s") or 0.0
        activity = _ACTIVITIES[doing.kind].format(number=doing.number)
        if doing.kind == "awaiting card":
            if busy_s > _GPU_S:
                engines = ", ".join(work.waiting.name for work in actor.held)
                evidence = f"for {busy_s:.0f} s the learner {activity}, which {engines} took and did not leave"
                yield finding("card not left", engines, evidence)
            continue
        waits = doing.kind in ("loading", "publishing", "saving")
        bound_s = _LOADING_S if waits or not state.steps else max(_LEAST_S, _STEPS * slowest_s)
        if state.packed_ns:
            packed_s = state.since_s(max(state.packed_ns, state.opened_ns))
            busy_s = min(busy_s, packed_s) if doing.kind else packed_s
        if busy_s <= bound_s:
            continue
        evidence = f"for {busy_s:.0f} s the learner {activity}"
        if doing.kind == "awaiting teacher":
            yield finding("teacher away", state.config.learner.teacher.url, evidence)
            continue
        batch = f"batch {state.trained + 1} is packed" if state.packed_ns else "no batch is packed yet"
        evidence = f"{batch}; {evidence}, its slowest step took {slowest_s:.1f} s"
        yield finding("learner behind", actor.actor_id, evidence)


def _empty_pools(state: RunState) -> Iterator[StallFound]:
    """Find pools that were scaled to 0 while work waits for them: others may train on without their tasks."""
    roles = dict.fromkeys(pool.role for pool in state.tables.pools)
    for pool in [*roles, *(pool.pool for pool in state.tables.pools)]:
        if state.wanted.get(pool) == 0:
            yield from _without_worker(state, pool)


def _idle(state: RunState, ill: set[str]) -> Iterator[StallFound]:
    """Find work that waits in a queue without a consumer, of pools that are not known as empty."""
    roles = ("rollout", *GRADERS)
    for pool in [*roles, *(pool.pool for pool in state.tables.pools if pool.role in roles)]:
        if pool not in ill:
            yield from _without_worker(state, pool)


def _without_worker(state: RunState, pool: str) -> Iterator[StallFound]:
    queue, role = Counter[str](), role_of(pool)
    for own in state.tables.queues_of_pool(pool):
        queue.update(state.queues.get(own.name, {}))
    living = [one for one in state.of_role(role) if pool_of(one.actor_id) == pool and one.live and not one.process]
    waiting, held = queue["waiting"], queue["under_way"]  # also what workers that are gone held
    if (waiting or held) and not (living and (held or queue["pulls"])):
        wanted = sum(pool_of(name) == pool for name in state.names_of(role)) if state.wanted else 0
        present = f"{len(living)} of {wanted} workers live" if wanted else f"{pool} was scaled to 0"
        left = f" and {held:,} are left of workers that are gone" if held else ""
        evidence = f"{waiting:,} wait in its queue{left}; {present}, none asks for work"
        yield finding("no worker", pool, evidence)


def _patient_s(work: HeldWork) -> float:
    """Seconds without progress after which work hangs: requests, tools and rewards take longer than functions."""
    return _HELD_S if work.waiting.on == "function" else _REQUEST_S


def _version(state: RunState, ill: set[str]) -> Iterator[StallFound]:
    """Trajectories that wait for an engine, and none may serve them; before version 0 is published none can."""
    waiting = [work for _, work in _held(state, "rollout", ill) if work.waiting.on == "version"]
    if not waiting or state.version is None:
        return
    least = min(work.waiting.version for work in waiting)
    if state.owed is not None and state.owed >= least:
        late_s = state.since_s(state.steps[-1].time_ns)
        evidence = f"{waiting[0].id} waits for version {least}, trained {late_s:.0f} s ago and not published"
        yield from _behind(state, ill, evidence)
        return
    of_role = state.of_role("engine")
    ready = _ready_engines(state, of_role)
    evidence = f"{waiting[0].id} has waited {waiting[0].held_s:.0f} s for version {least} or newer"
    if not state.names_of("engine"):
        yield finding("no worker", "engine", f"{evidence}; engine was scaled to 0")
    elif not ready:
        started = ", ".join(f"{actor.actor_id} {state.since_s(actor.starts[-1]):.0f} s ago" for actor in of_role)
        yield finding("engine dead", "engine", f"{evidence}; no engine takes requests; started: {started or 'none'}")
    elif (newest := max(least if engine.version is None else engine.version for engine in ready)) < least:
        evidence += f"; engines have {newest} at most, the newest published is {state.version}"
        yield finding("version not loaded", f"version {least}", evidence)


def _behind(state: RunState, ill: set[str], evidence: str) -> Iterator[StallFound]:
    for actor in state.of_role("learner"):
        if actor.actor_id not in ill:
            yield finding("learner behind", actor.actor_id, evidence)


def _ready_engines(state: RunState, actors: list[Actor]) -> list[Engine]:
    known = [(engine, actor.starts[-1]) for actor in actors if (engine := state.engines.get(actor.actor_id))]
    return [engine for engine, start_ns in known if engine.state == "ready" and engine.ready_ns > start_ns]


def _rollout(state: RunState, ill: set[str]) -> Iterator[StallFound]:
    """Trajectories that their groups wait for: those that hang, and those that are slow."""
    works = [entry for entry in _held(state, "rollout", ill) if not _waits_elsewhere(entry[1].waiting, ill)]
    # An engine is judged by its own signs first; only then does a request hang there by itself.
    stuck = [entry for entry in works if entry[1].quiet_s >= _patient_s(entry[1])]
    slow = [entry for entry in works if entry[1].held_s >= _HELD_S and entry[1].quiet_s < _MOVES_S and not stuck]
    slow = slow if _too_slow(state) else []
    hanging: dict[str, list[HeldWork]] = {}  # by actor
    late: dict[str, tuple[Actor, HeldWork]] = {}
    for actor, work in stuck or slow:
        if 0 < _mates(state, work.id) < _group_size(state, work.id):
            late.setdefault(prompt_of(work.id), (actor, work))
        elif stuck:
            hanging.setdefault(actor.actor_id, []).append(work)
    if not stuck and (len(late) < len({prompt_of(work.id) for _, work in slow}) or len(late) > _BRIEF):
        return  # many trajectories that advance: credit is missing
    yield from _late(state, hanging, list(late.values())[:_BRIEF])


def _late(
    state: RunState, hanging: dict[str, list[HeldWork]], stragglers: list[tuple[Actor, HeldWork]]
) -> Iterator[StallFound]:
    for actor_id, pieces in hanging.items():
        evidence = f"{_times(pieces[0])} {_waiting_text(pieces[0].waiting)}, and {len(pieces) - 1} more hang"
        yield finding("rollout hanging", actor_id, evidence)
    for actor, work in stragglers:
        size, done = _group_size(state, work.id), _mates(state, work.id)
        where = f"on {actor.actor_id}, {_waiting_text(work.waiting)}"
        evidence = f"{done} of the {size} trajectories of its group are done; {_times(work)} {where}"
        yield finding("straggler", work.id, evidence)


def _waits_elsewhere(waiting: Waiting, ill: set[str]) -> bool:
    """Return whether work waits for something that has its own finding."""
    return (
        waiting.on in ("version", "turn")
        or waiting == _PREPARED
        or (waiting.on in ("engine", "retry") and waiting.name in ill)
    )


def _group_size(state: RunState, trajectory_id: str) -> int:
    return group_size_of(state.config, prompt_of(trajectory_id), state.stages_begun)


def _credit(state: RunState) -> Iterator[StallFound]:
    """Nothing is stuck: is there credit, are there prompts, is everything thrown away?"""
    config, warm = state.config, state.trained < 0
    groups = config.warmup.batch_groups if warm else config.buffer.batch_groups
    limit = min(config.buffer.max_lag + 1, _left(state)) * groups
    open_groups = state.gauge("prompter", "open_groups")
    dropped, has_rows = sum(state.drops.values()), config.live.fraction < 1
    doing = next((actor.doing for actor in state.of_role("prompter") if actor.vitals is not None), Activity())
    waits_s = state.gauge("prompter", "doing_s") or 0.0
    data = ", ".join(dict.fromkeys(task.source for task in tasks_of(config).values()))
    if doing.kind == "opening data":
        yield finding("slow data", "prompter", f"it has been opening {data} for {waits_s:.0f} s")
    elif doing.kind == "making row" and (waits_s >= _SLOW_ROW_S or dropped < groups):
        data = (warm and config.warmup.source) or data
        evidence = f"it has been making row {doing.number} of {data} for {waits_s:.0f} s"
        evidence += f"; {open_groups or 0:.0f} of at most {limit} groups are open, and a batch takes {groups}"
        yield finding("slow data", "prompter", evidence)
    elif not has_rows and (open_groups or 0) < groups and (not open_groups or dropped < groups):
        return  # turns come when people talk
    elif has_rows and open_groups is not None and open_groups < groups and state.gauge("prompter", "no_more_prompts"):
        times, left = counted(config.task.epochs, "time"), counted(int(open_groups), "group")
        evidence = f"every row was issued {times}; {left} left, and a batch takes {groups}"
        yield finding("end of data", "prompter", evidence)
    elif dropped >= groups:
        reasons = ", ".join(f"{count} for {reason}" for reason, count in state.drops.items())
        yield finding("groups dropped", "buffer", f"{dropped:,} groups were dropped since the last batch: {reasons}")
    elif open_groups == 0:
        evidence = f"no group is open and there is credit for {limit}, but no prompt was issued"
        yield finding("end of data", "prompter", evidence)
    elif _is_long(state):
        yield _long_step(state, open_groups, limit, groups)


def _long_step(state: RunState, open_groups: float | None, limit: int, groups: int) -> StallFound:
    ready = int(state.gauge("buffer", "ready_groups") or 0)
    if open_groups is None or open_groups < limit or _ends(state):
        evidence = f"nothing was trained for {stalled_s(state):.0f} s; {open_groups} groups open, {ready} complete"
        return finding("unexplained", state.run, evidence)
    works = [work for _, work in state.held("rollout")]
    held = {role: queued(state, role)["under_way"] for role in ("rollout", "reward")}
    longest = f"; the longest: {_times(works[0])}" if works else ""
    evidence = (
        f"{open_groups:.0f} of at most {limit} groups are open; {ready} are complete, a batch takes "
        f"{groups}; {held['rollout']:,} trajectories run, {held['reward']:,} are being graded{longest}"
    )
    return finding("no credit", "prompter", evidence)


def _is_long(state: RunState) -> bool:
    """Return whether a step takes much longer than the steps before; the first steps have none to compare with."""
    known = _pace_s(state) is not None
    return stalled_s(state) > (max(_UNEXPLAINED_S, 4 * patience_s(state)) if known else _FIRST_STEP_S)


def _too_slow(state: RunState) -> bool:
    """Return whether nothing was trained for too long although work advances.

    Before there is a pace the duration is unknown, and the last batches wait for all of their groups.
    """
    known = _pace_s(state) is not None and not _ends(state)
    return stalled_s(state) > (patience_s(state) if known else _UNEXPLAINED_S)


def _left(state: RunState) -> int:
    """Batches that the warm-up, or the run, still has to train."""
    return (0 if state.trained < 0 else state.total) - state.trained


def _ends(state: RunState) -> bool:
    """Return whether no batch is left beyond those that may be open."""
    return _left(state) <= state.config.buffer.max_lag + 1


def _mates(state: RunState, name: str) -> int:
    """Members of a trajectory's group that are graded or failed."""
    return sum(prompt_of(ended) == prompt_of(name) for ended in state.ended)


def _times(work: HeldWork) -> str:
    tokens = f" at {work.tokens:,} tokens" if work.tokens else ""
    return f"{work.id} has run for {work.held_s:.0f} s, without progress for {work.quiet_s:.0f} s{tokens}"


def _waiting_text(waiting: Waiting) -> str:
    return _WAITING[waiting.on].format(name=waiting.name, version=waiting.version, fault=waiting.fault)
