"""Diagnose a run from its picture: a pure function that names causes, and not their consequences.

Some facts are wrong by themselves, whether training goes on or not. Why nothing is trained is then asked along the way
of a batch, backwards: the learner waits for a batch, the buffer for groups, groups for their members, members for
rewards, functions and engines, and all of them for the prompter's credit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from asyncrl.state.facts import faults
from asyncrl.state.findings import Finding
from asyncrl.state.picture import Actor, Picture
from topics.actors import HeldWork

_LEAST_S = 5.0  # silence shorter than this is no stall
_STEPS = 3.0  # nor is one shorter than so many steps
_FIRST_S = 10.0  # before there is a pace to compare with
_FEW_STEPS = 4  # of a stage, which make no pace
_COMPILING_S = 120.0  # after a server on a GPU is ready for the first time
_LOADING_S = 120.0  # for a learner to load its model, or to save it
_HELD_S = 4.0  # work that has come no further for this long, while nothing is trained, hangs
_REQUEST_S = 15.0  # and so does a request to an engine that is well otherwise
_MOVES_S = 2.0  # an actor with progress so recent is advancing
_FLAT_STEPS = 5  # with equal rewards, before that is worth a remark
_BRIEF = 4  # groups that are few enough to be called stragglers
_UNEXPLAINED_S = 60.0
_BESIDE = ("dead letters", "clock off")  # no process waits for these


def diagnose(picture: Picture) -> list[Finding]:
    """Everything that keeps a run from coming further, root causes only.

    Args:
        picture: the run at one moment; its `now_ns` is the time of the diagnosis.

    Returns:
        Findings, in the order in which to look at them; none for a run that is well, or over.
    """
    found = list(faults(picture))
    if picture.finished or picture.stopping:
        return [finding for finding in found if finding.blocks]  # processes and servers leave one after the other
    if not picture.opened_ns or any(finding.blocks for finding in found):
        return found
    if stalled_s(picture) > patience_s(picture) and not _compiles(picture):
        found += _stall(picture, found)
    return found


def stalled_s(picture: Picture) -> float:
    """Return the seconds since a batch was trained, or since all actors were there to train the first one."""
    starts = [actor.starts[-1] for actor in picture.actors.values() if actor.starts]
    newest = picture.steps[-1].time_ns if picture.steps else 0
    if newest < picture.opened_ns:  # nothing was trained since the run was opened
        newest = max([picture.opened_ns, *starts])
    return picture.since_s(newest)


def patience_s(picture: Picture) -> float:
    """Seconds without a step that are no stall at the pace this run had."""
    pace_s = _pace_s(picture)
    return _FIRST_S if pace_s is None else max(_LEAST_S, _STEPS * pace_s)


def _pace_s(picture: Picture) -> float | None:
    """Seconds between two steps of the stage that the run is in; None as long as it has done few of them."""
    warm = picture.trained < 0
    steps = [step for step in picture.steps if step.time_ns >= picture.opened_ns and (step.stage == "warmup") is warm]
    if len(steps) <= _FEW_STEPS:
        return None
    return statistics.median((after.time_ns - before.time_ns) / 1e9 for before, after in pairwise(steps))


def headline(picture: Picture) -> str:
    """Describe the run in one line, where nothing was found."""
    if picture.finished or picture.stopping:
        return "stopping"
    newest = picture.steps[-1] if picture.steps else None
    if not picture.opened_ns:
        return "starting: not opened yet"
    if newest is None or newest.time_ns < picture.opened_ns:
        return f"starting: opened {picture.since_s(picture.opened_ns):.0f} s ago, no step yet"
    total = f" of {picture.config.learner.steps}" if newest.stage == "rl" else " (warm-up)"
    learnt = [step.spread for step in picture.steps if step.stage == "rl"]
    flat = len(learnt) >= _FLAT_STEPS and not any(learnt)
    remark = f"; all rewards of a batch were equal in its last {len(learnt)} steps: nothing is learned" if flat else ""
    return f"healthy: step {newest.step}{total}, {max(0.0, picture.since_s(newest.time_ns)):.1f} s ago{remark}"


def _stall(picture: Picture, known: list[Finding]) -> list[Finding]:
    """Return the causes for which no batch is trained."""
    if picture.trained >= picture.config.learner.steps:
        return []
    if picture.packed is not None and picture.packed > picture.trained:
        return [] if _explains(known, "learner") else list(_learner(picture))
    learner = next(iter(picture.of_role("learner")), None)
    if learner is not None and learner.vitals is not None and learner.vitals.doing == "loads the model":
        return list(_learner(picture))
    if _starts(picture) or _explains(known, "buffer", "prompter"):
        return []
    ill = {finding.object for finding in known}
    found = [*_idle(picture), *_reward(picture, ill), *_rollout(picture, ill)]
    if not _explains(known, "engine"):
        found += _version(picture, ill)
    if not (found or _recovers(picture) or any(finding.cause not in _BESIDE for finding in known)):
        found += _credit(picture)
    return found


def _starts(picture: Picture) -> bool:
    """Return whether the inference servers of a run that was just opened may still take their time."""
    begun = any(step.time_ns > picture.opened_ns for step in picture.steps)
    ready = any(engine.ready_ns > picture.opened_ns for engine in picture.engines.values())
    return not (begun or ready) and picture.since_s(picture.opened_ns) < picture.config.engine.start_deadline_s


def _compiles(picture: Picture) -> bool:
    """Return whether a server on a GPU may still compile its kernels: its first requests take up to a minute."""
    if picture.config.engine.kind in ("embedded", "scripted"):
        return False
    begun = any(step.stage == "rl" and step.time_ns > picture.opened_ns for step in picture.steps)
    ready = min((engine.ready_ns for engine in picture.engines.values() if engine.ready_ns), default=0)
    return not begun and bool(ready) and picture.since_s(max(ready, picture.opened_ns)) < _COMPILING_S


def _explains(known: list[Finding], *roles: str) -> bool:
    return any(finding.object.rsplit("-", 1)[0] in roles for finding in known)


def _recovers(picture: Picture) -> bool:
    """Return whether a worker or engine was started so recently that earlier work may still be on lease."""
    lease_s = picture.config.rollout.lease_s + _LEAST_S
    workers = [actor for role in ("rollout", "reward", "engine") for actor in picture.of_role(role)]
    return any(actor.starts and picture.since_s(actor.starts[-1]) < lease_s for actor in workers)


def _held(picture: Picture, role: str, ill: set[str]) -> list[tuple[Actor, HeldWork]]:
    """Return the held work of healthy workers that has been waiting for seconds: reports of others are old."""
    return [(actor, work) for actor, work in picture.held(role) if actor.actor_id not in ill]


def _learner(picture: Picture) -> Iterator[Finding]:
    """A batch waits for the learner: is it slow?"""
    slowest_s = max((step.train_s for step in picture.steps), default=0.0)
    for actor in picture.of_role("learner")[:1]:
        doing = actor.vitals.doing if actor.vitals is not None else ""
        busy_s = actor.gauge("doing_s") or 0.0
        waits = doing.startswith(("loads", "saves"))
        bound_s = _LOADING_S if waits or not picture.steps else max(_LEAST_S, _STEPS * slowest_s)
        if picture.packed_ns:
            busy_s = min(busy_s, picture.since_s(picture.packed_ns)) if doing else picture.since_s(picture.packed_ns)
        if busy_s <= bound_s:
            continue
        batch = f"batch {picture.trained + 1} is packed" if picture.packed_ns else "no batch is packed yet"
        evidence = f"{batch}; the learner {doing or 'has not reported its activity'} for {busy_s:.0f} s"
        yield Finding("learner behind", actor.actor_id, f"{evidence}, its slowest step took {slowest_s:.1f} s")


def _idle(picture: Picture) -> Iterator[Finding]:
    """Find work that waits in a queue without a consumer."""
    for role in ("rollout", "reward"):
        queue = picture.queues.get(role, {})
        living = [actor for actor in picture.of_role(role) if actor.live and not actor.process]
        if queue.get("waiting") and not queue.get("under_way") and not (queue.get("pulls") and living):
            wanted = picture.wanted.get(role, 0)
            present = f"{len(living)} of {wanted} workers live" if wanted else f"{role} was scaled to 0"
            evidence = f"{queue['waiting']:,} wait in its queue; {present}, none asks for work"
            yield Finding("no worker", role, evidence)


def _reward(picture: Picture, ill: set[str]) -> Iterator[Finding]:
    """Trajectories that are being graded for too long."""
    seen: set[str] = set()
    for actor, work in _held(picture, "reward", ill):
        if work.quiet_s < _HELD_S or work.place == "its turn" or actor.actor_id in seen:
            continue
        seen.add(actor.actor_id)
        done = int((actor.gauge("graded") or 0) + (actor.gauge("failed") or 0))
        queue = picture.queues.get("reward", {})
        evidence = (
            f"grades {work.id} for {work.held_s:.0f} s, {done:,} done before; reward workers have "
            f"{queue.get('under_way', 0):,}, {queue.get('waiting', 0):,} more wait; reward.time_limit_s is "
            f"{picture.config.reward.time_limit_s:g}"
        )
        yield Finding("reward hanging", actor.actor_id, evidence)


def _version(picture: Picture, ill: set[str]) -> Iterator[Finding]:
    """Trajectories that wait for an engine, and none may serve them; before version 0 is published none can."""
    waiting = [work for _, work in _held(picture, "rollout", ill) if work.place.startswith("an engine")]
    if not waiting or picture.published is None:
        return
    least = min(int(work.place.rsplit(" ", 1)[1]) for work in waiting)
    of_role = picture.of_role("engine")
    started_engines = [(picture.engines.get(actor.actor_id), actor.starts) for actor in of_role]
    ready = [
        engine
        for engine, starts in started_engines
        if engine and engine.state == "ready" and engine.ready_ns > starts[-1]
    ]
    evidence = f"{waiting[0].id} waits for version {least} or newer for {waiting[0].held_s:.0f} s"
    if not ready:
        ages = [picture.since_s(actor.starts[-1]) for actor in of_role]
        started = ", ".join(f"{actor.actor_id} {age:.0f} s ago" for actor, age in zip(of_role, ages, strict=True))
        yield Finding("engine dead", "engine", f"{evidence}; no engine takes requests; started: {started or 'none'}")
    elif all(engine.version is not None and engine.version < least for engine in ready):
        newest = max(engine.version or 0 for engine in ready)
        evidence += f"; engines have {newest} at most, the newest published is {picture.published}"
        yield Finding("version not loaded", f"version {least}", evidence)


def _rollout(picture: Picture, ill: set[str]) -> Iterator[Finding]:
    """Trajectories that their groups wait for: those that hang, and those that are slow."""
    held = _held(picture, "rollout", ill)
    waits = ("an engine", "its turn", *ill)
    works = [(actor, work) for actor, work in held if not work.place.startswith(waits)]
    # An engine is judged by its own signs first; only then does a request hang there by itself.
    stuck = [(actor, work) for actor, work in works if work.quiet_s >= (_REQUEST_S if work.place else _HELD_S)]
    slow = [entry for entry in works if entry[1].held_s >= _HELD_S and entry[1].quiet_s < _MOVES_S and not stuck]
    slow = slow if _too_slow(picture) else []
    hanging: dict[str, list[HeldWork]] = {}
    late: dict[str, tuple[Actor, HeldWork]] = {}
    for actor, work in stuck or slow:
        if 0 < _mates(picture, work.id) < picture.config.rollout.group_size:
            late.setdefault(work.id.rsplit("-", 1)[0], (actor, work))
        elif stuck:
            hanging.setdefault(actor.actor_id, []).append(work)
    if not stuck and (len(late) < len({work.id.rsplit("-", 1)[0] for _, work in slow}) or len(late) > _BRIEF):
        return  # many trajectories that advance: what is missing is credit
    for actor_id, pieces in hanging.items():
        where = pieces[0].place or "in the rollout function"
        evidence = f"{_times(pieces[0])} {where}, and {len(pieces) - 1} more hang for seconds"
        yield Finding("rollout hanging", actor_id, evidence)
    for actor, work in list(late.values())[:_BRIEF]:
        size, done = picture.config.rollout.group_size, _mates(picture, work.id)
        where = work.place or "in the rollout function"
        evidence = f"{done} of its group of {size} are done; {_times(work)} on {actor.actor_id}, {where}"
        yield Finding("straggler", work.id, evidence)


def _credit(picture: Picture) -> Iterator[Finding]:
    """Nothing is stuck: is there credit, are there prompts, is everything thrown away?"""
    config, warm = picture.config, picture.trained < 0
    groups = config.warmup.batch_rows // config.warmup.rows_per_trajectory if warm else config.buffer.batch_groups
    limit = min(config.buffer.max_lag + 1, _left(picture)) * groups
    open_groups = picture.gauge("prompter", "open_groups")
    ready = int(picture.gauge("buffer", "ready_groups") or 0)
    dropped = sum(picture.drops.values())
    doing = next((actor.vitals.doing for actor in picture.of_role("prompter") if actor.vitals is not None), "")
    if doing.startswith("makes row"):
        waits_s = picture.gauge("prompter", "doing_s") or 0.0
        evidence = f"it {doing} of {config.task.source} for {waits_s:.0f} s; {open_groups or 0:.0f} groups are open"
        yield Finding("slow data", "prompter", f"{evidence}, {limit} may be, and a batch takes {groups}")
    elif open_groups is not None and open_groups < groups and picture.gauge("prompter", "no_more_prompts"):
        times = f"{config.task.epochs} time{'s' * (config.task.epochs > 1)}"
        evidence = f"every row was issued {times}; {open_groups:.0f} groups are left and a batch takes {groups}"
        yield Finding("end of data", "prompter", evidence)
    elif dropped >= groups:
        reasons = ", ".join(f"{count} for {reason}" for reason, count in picture.drops.items())
        yield Finding("groups dropped", "buffer", f"{dropped:,} groups were dropped since the last batch: {reasons}")
    elif open_groups == 0:
        evidence = f"no group is open and there is credit for {limit}, but no prompt was issued"
        yield Finding("end of data", "prompter", evidence)
    elif open_groups is not None and open_groups >= limit and _too_slow(picture) and not _ends(picture):
        works = [work for _, work in picture.held("rollout")]
        held = {role: picture.queues.get(role, {}).get("under_way", 0) for role in ("rollout", "reward")}
        longest = f"; the longest: {_times(works[0])}" if works else ""
        evidence = (
            f"{open_groups:.0f} groups are open, {limit} may be; {ready} are complete, a batch takes "
            f"{groups}; {held['rollout']:,} trajectories under way, {held['reward']:,} graded{longest}"
        )
        yield Finding("no credit", "prompter", evidence)
    elif stalled_s(picture) > max(_UNEXPLAINED_S, 4 * patience_s(picture)):
        evidence = f"nothing was trained for {stalled_s(picture):.0f} s; {open_groups} groups open, {ready} complete"
        yield Finding("unexplained", picture.run, evidence)


def _too_slow(picture: Picture) -> bool:
    """Return whether nothing was trained for too long although work advances.

    Before there is a pace the duration is unknown, and the last batches wait for all of their groups.
    """
    known = _pace_s(picture) is not None and not _ends(picture)
    return stalled_s(picture) > (patience_s(picture) if known else _UNEXPLAINED_S)


def _left(picture: Picture) -> int:
    """Batches that the warm-up, or the run, still has to train."""
    return (0 if picture.trained < 0 else picture.config.learner.steps) - picture.trained


def _ends(picture: Picture) -> bool:
    """Return whether no batch is left beyond those that may be open."""
    return _left(picture) <= picture.config.buffer.max_lag + 1


def _mates(picture: Picture, name: str) -> int:
    """Members of a trajectory's group that are graded or failed."""
    prompt_id = name.rsplit("-", 1)[0]
    return sum(ended.rsplit("-", 1)[0] == prompt_id for ended in picture.ended)


def _times(work: HeldWork) -> str:
    tokens = f" at {work.tokens:,} tokens" if work.tokens else ""
    return f"{work.id} is under way for {work.held_s:.0f} s, came no further for {work.quiet_s:.0f} s{tokens}"
