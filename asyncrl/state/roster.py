"""The actors of a run and its inference servers: wanted, present, and their load."""

from __future__ import annotations

from collections import Counter

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.state.records import SILENT_S, Actor, Engine, Scaling
from topics.actors import AutoscaleFailed, FleetScaled, HeldWork, Vitals
from topics.engines import EngineAnnounced, EngineGone, EngineReady, EngineUpdating, EngineWithdrawn
from topics.roles import pool_of, role_of
from topics.weights import WeightsRefused


class Roster(Fold):
    """The part of a run's state that is about its actors and inference servers."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.wanted: dict[str, int] = {}  # processes by pool: a role, or a group of engines
        self.scaled_ns = self.scaled_at = 0  # when that was decided, and the sequence of the decision
        self.scaled_for = 0  # sequence of the newest request that is answered
        self.scalings: dict[str, Scaling] = {}  # the newest of each pool since the first start
        self.autoscale_fault = ""  # why the user's function does not answer
        self.announced: dict[str, str] = {}  # addresses of engines that were announced during the run
        self.withdrawn: set[str] = set()  # engines that shall be left
        self.engines: dict[str, Engine] = {}  # by name
        self.vitals_ns = 0  # newest vital signs of any actor

    @property
    def restarts(self) -> int:
        """Return how often an actor was started again."""
        return sum(actor.restarts for actor in self.actors.values())

    @property
    def fleet(self) -> list[Actor]:
        """Actors that are wanted, and others as long as they live: one that dies then is never started again."""
        known = {role_of(pool) for pool in self.wanted}
        wanted = {name for role in known for name in self.names_of(role)}
        silent_ns = self.vitals_ns - int(SILENT_S * 1e9)
        return [
            actor
            for actor in self.actors.values()
            if actor.role not in known or actor.actor_id in wanted or (actor.live and actor.since_ns > silent_ns)
        ]

    def of_role(self, role: str) -> list[Actor]:
        """Actors of a role that are wanted."""
        names = self.names_of(role)
        return [self.actors[name] for name in names if name in self.actors and self.actors[name].starts]

    def names_of(self, role: str) -> list[str]:
        """Names of the actors of a role that are wanted; one, where the numbers of processes are not known."""
        pools = {pool: count for pool, count in self.wanted.items() if role_of(pool) == role} or {role: 1}
        names = [f"{pool}-{number}" for pool, count in pools.items() for number in range(1, count + 1)]
        names += list(self.announced) if role == "engine" else []
        return [name for name in names if name not in self.withdrawn]

    @property
    def pools(self) -> dict[str, int]:
        """The number of processes that are wanted of each pool, engines with them that were announced."""
        names = [name for role in {role_of(pool) for pool in self.wanted} for name in self.names_of(role)]
        return dict.fromkeys(self.wanted, 0) | Counter(map(pool_of, names))

    def held(self, role: str) -> list[tuple[Actor, HeldWork]]:
        """Work that actors of a role have had for seconds, the oldest first."""
        found = [(actor, work) for actor in self.of_role(role) for work in actor.held]
        return sorted(found, key=lambda entry: -entry[1].held_s)

    def gauge(self, role: str, name: str) -> float | None:
        """A gauge of the keeper of this role that folded most lately."""
        known = [actor for actor in self.of_role(role) if actor.gauge(name) is not None]
        return max(known, key=lambda actor: actor.seen_ns).gauge(name) if known else None

    def _on_announced(self, message: EngineAnnounced, _record: Record) -> None:
        message.check()
        self.announced[message.engine_id] = message.address
        self.withdrawn.discard(message.engine_id)

    def _on_withdrawn(self, message: EngineWithdrawn, _record: Record) -> None:
        self.announced.pop(message.engine_id, None)
        self.withdrawn.add(message.engine_id)

    def note_scaled(self, message: FleetScaled, record: Record) -> None:
        """Take in how many processes each pool has from here on."""
        for pool, count in message.wanted.items() if message.by not in ("", "start") else ():
            before = self.wanted.get(pool, 0)
            self.scalings[pool] = Scaling(before, count, message.by, message.reason, record.time_ns)
        self.wanted.update(message.wanted)
        self.scaled_ns, self.scaled_at = record.time_ns, record.sequence
        self.scaled_for = max(self.scaled_for, message.request)

    def _on_autoscale_failed(self, message: AutoscaleFailed, _record: Record) -> None:
        self.autoscale_fault = message.reason

    def _engine(self, engine_id: str) -> Engine:
        return self.engines.setdefault(engine_id, Engine(engine_id))

    def _on_ready(self, message: EngineReady, record: Record) -> None:
        engine, actor = self._engine(message.engine_id), self.actors.get(message.engine_id)
        if not engine.first_ns or (actor is not None and actor.starts and actor.starts[-1] > engine.ready_ns):
            engine.first_ns = record.time_ns
        engine.address, engine.version, engine.update_s = message.address, message.version, message.update_s
        engine.ready_ns, engine.fallback = record.time_ns, message.fallback
        engine.fallbacks = engine.fallbacks + 1 if message.fallback else 0

    def _on_refused(self, message: WeightsRefused, record: Record) -> None:
        engine = self._engine(message.engine_id)
        engine.refused, engine.refused_ns = message.version, record.time_ns

    def _on_updating(self, message: EngineUpdating, record: Record) -> None:
        engine = self._engine(message.engine_id)
        engine.updating, engine.updating_ns = message.version, record.time_ns
        if message.found:
            engine.found, engine.found_ns = message.found, record.time_ns

    def _on_engine_gone(self, message: EngineGone, record: Record) -> None:
        engine = self._engine(message.engine_id)
        engine.reason, engine.asked, engine.gone_ns = message.reason, message.asked, record.time_ns

    def _on_vitals(self, message: Vitals, record: Record) -> None:
        actor = self.actors.get(message.actor_id)
        if actor is not None:
            actor.on_vitals(message, record.time_ns)
            self.vitals_ns = max(self.vitals_ns, record.time_ns)
