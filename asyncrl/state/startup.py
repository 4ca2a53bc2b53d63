"""The processes and the work that a run waits for before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.records import Actor, counted
from asyncrl.state.run_state import RunState
from topics.roles import role_of

_EVERY_S = 10.0  # between two lines
_NAMED = 6  # processes
_ACTIVITIES = {
    "loading": "loads the model",
    "training": "trains batch {number}",
    "publishing": "copies version {number}",
    "saving": "copies checkpoint {number}",
    "awaiting teacher": "waits for the teacher's log-probs of batch {number}",
    "awaiting card": "waits for the GPU",
    "taking over": "takes over",
    "opening data": "opens the data",
    "making row": "makes row {number} of the data",
}


class StartupLines:
    """Reports every ten seconds, from the start of the supervisor to the first step, what the run waits for."""

    def __init__(self) -> None:
        self._reported_ns = 0

    def report(self, state: RunState, now_ns: int) -> None:
        """Add a line to the events of the run if one is due.

        Args:
            now_ns: the time, nanoseconds since 1970.
        """
        supervisor = state.actors.get(SUPERVISOR)
        if state.phase != "running" or supervisor is None or has_begun(state):
            return
        since_ns = max(self._reported_ns, supervisor.starts[-1], state.opened_ns)
        if now_ns - since_ns >= _EVERY_S * 1e9:
            self._reported_ns = now_ns
            state.report("news", now_ns, f"waiting for {'; '.join(awaited(state, now_ns))}")


def has_begun(state: RunState) -> bool:
    """Return whether the run has trained a step, or serves, since it was opened."""
    if state.config.trains:
        return bool(state.steps) and state.steps[-1].time_ns >= state.opened_ns
    if "gateway" in state.config.only:
        return state.serves_ns >= state.opened_ns
    return any(engine.ready_ns > state.opened_ns for engine in state.engines.values())


def awaited(state: RunState, now_ns: int) -> list[str]:
    """Return what the first step waits for, each as a noun phrase with the seconds that it has taken."""
    wanted = [name for role in dict.fromkeys(map(role_of, state.wanted)) for name in state.names_of(role)]
    absent = [name for name in wanted if name not in state.actors or not state.actors[name].live]
    found = [f"{_listed(absent)} to start"] if absent else []
    for role in ("learner", "prompter"):
        for actor in state.of_role(role)[:1]:
            found += _activity(actor)
    if not state.warmup_steps or state.version is not None:  # the warm-up needs no engine
        found += _engines(state, now_ns)
    return found or [_first_batch(state)]


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _activity(actor: Actor) -> Iterator[str]:
    if actor.live and actor.vitals is None:
        yield f"a sign of life of {actor.actor_id}"
    elif actor.live and actor.vitals is not None and (words := _ACTIVITIES.get(actor.vitals.doing.kind)):
        seconds = actor.gauge("doing_s") or 0.0
        yield f"{actor.actor_id}, which {words.format(number=actor.vitals.doing.number)} ({seconds:.0f} s)"


def _engines(state: RunState, now_ns: int) -> Iterator[str]:
    """Engines that have not taken requests since they were started, unless another one does."""
    engines = [actor for actor in state.of_role("engine") if actor.live]
    ready = {name for name, engine in state.engines.items() if engine.ready_ns > state.opened_ns}
    if engines and not ready:
        age_s = (now_ns - min(actor.starts[-1] for actor in engines)) / 1e9
        yield f"the server of {_listed([actor.actor_id for actor in engines])}, which starts ({age_s:.0f} s)"


def _first_batch(state: RunState) -> str:
    config, warm = state.config, state.trained < 0
    groups = config.warmup.batch_groups if warm else config.buffer.batch_groups
    ready = int(state.gauge("buffer", "ready_groups") or 0)
    runs = sum(state.queues.get(pool, {}).get("under_way", 0) for pool in state.wanted if role_of(pool) == "rollout")
    return f"the first batch: {ready:,} of {groups:,} groups are complete; running: {counted(runs, 'trajectory')}"
