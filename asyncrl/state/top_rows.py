"""The tables of `asyncrl top`: rows of actors, engines, trajectories, waits, findings and logs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from asyncrl.state.records import duration
from asyncrl.telemetry.logs import Line
from topics.actors import HeldWork, Vitals
from topics.runs import ActorStatus, RunStatus

TableName: TypeAlias = Literal["actors", "engines", "trajectories", "waits", "findings", "logs"]
TABLES: tuple[TableName, ...] = get_args(TableName)
_SILENT_S = 10.0  # without vital signs
_DONE = ("step", "generated", "graded", "packed", "requests")  # vital signs: what an actor has done, or does
_LINES = 2000  # of logs that are kept

Cell: TypeAlias = str | float | None


class Column(NamedTuple):
    """A column of a table."""

    name: str
    form: str = ""  # of numbers: a format, or "time"; "" for texts
    share: int = 0  # of the free width that a text gets; 0: as wide as its values


COLUMNS: dict[TableName, tuple[Column, ...]] = {
    "actors": (
        Column("actor"),
        Column("state"),
        Column("cores", ".2f"),
        Column("done", ",.0f"),
        Column("held", ",.0f"),
        Column("age", "time"),
        Column("doing", share=2),
        Column("host", share=1),
    ),
    "engines": (
        Column("engine"),
        Column("state"),
        Column("version", ",.0f"),
        Column("requests", ",.0f"),
        Column("cache", ".0%"),
        Column("GPU", ".0%"),
        Column("update", ".2f"),
        Column("host", share=1),
    ),
    "trajectories": (
        Column("trajectory"),
        Column("held", "time"),
        Column("quiet", "time"),
        Column("tokens", ",.0f"),
        Column("waits for", share=1),
        Column("actor"),
    ),
    "waits": (
        Column("waits for", share=1),
        Column("count", ",.0f"),
        Column("longest", "time"),
        Column("oldest"),
        Column("actor"),
    ),
    "findings": (Column("age", "time"), Column("kind"), Column("object"), Column("evidence", share=1)),
    "logs": (Column("time"), Column("actor"), Column("level"), Column("event", share=1)),
}


class Facts:
    """The newest facts about a run."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.lines: deque[Line] = deque(maxlen=_LINES)
        self._bodies: dict[str, bytes] = {}  # vital signs as they came, by actor
        self._vitals: dict[str, Vitals] = {}  # decoded ones

    def take_vitals(self, actor_id: str, body: bytes) -> None:
        """Take in vital signs; they are decoded when they are shown."""
        self._bodies[actor_id] = body

    @property
    def vitals(self) -> dict[str, Vitals]:
        """The newest vital signs of each actor."""
        for actor_id, body in self._bodies.items():
            try:
                self._vitals[actor_id] = msgspec.json.decode(body, type=Vitals)
            except msgspec.MsgspecError:
                continue  # of a newer version of asyncrl
        self._bodies.clear()
        return self._vitals

    def rows(self, table: TableName) -> list[tuple[Cell, ...]]:
        """Return the rows of a table, in no order."""
        makers = {
            "actors": self._actors,
            "engines": self._engines,
            "trajectories": self._trajectories,
            "waits": self._waits,
            "findings": self._findings,
            "logs": self._logs,
        }
        return list(makers[table]())

    def _now_s(self) -> float:
        return self.status.at_s if self.status is not None else 0.0

    def _actors(self) -> Iterator[tuple[Cell, ...]]:
        now_s = self._now_s()
        known = {actor.actor_id: actor for actor in self.status.actors} if self.status is not None else {}
        for actor_id, vitals in self.vitals.items():
            actor, age_s = known.pop(actor_id, None), max(0.0, now_s - vitals.at_s)
            state = _state(actor, age_s)
            if actor is None and age_s > _SILENT_S:
                continue  # it left, or `run.state` does not list it
            values, host = vitals.values, "" if actor is None else actor.host
            done = next((values[name] for name in _DONE if name in values), None)
            yield (
                actor_id,
                state,
                values.get("cpu_share"),
                done,
                values.get("held"),
                age_s,
                _doing(vitals) if state == "live" or actor is None else actor.last_error or _doing(vitals),
                host,
            )
        for actor in known.values():
            yield (actor.actor_id, _state(actor, 0.0), None, None, None, None, actor.last_error, actor.host)

    def _engines(self) -> Iterator[tuple[Cell, ...]]:
        if self.status is None:
            return
        hosts = {actor.actor_id: actor.host for actor in self.status.actors}
        for engine in self.status.engines:
            vitals = self.vitals.get(engine.engine_id)
            values = vitals.values if vitals is not None else {}
            gauges = (values.get("requests"), values.get("cache_share"), values.get("gpu_share"))
            host = hosts.get(engine.engine_id, "")
            yield (engine.engine_id, engine.state, engine.version, *gauges, engine.update_s, host)

    def _held(self) -> Iterator[tuple[str, HeldWork, float]]:
        """Yield the held work of living actors, and the seconds since they reported it."""
        for actor_id, vitals in self.vitals.items():
            age_s = max(0.0, self._now_s() - vitals.at_s)
            if age_s <= _SILENT_S:
                yield from ((actor_id, work, age_s) for work in vitals.held)

    def _trajectories(self) -> Iterator[tuple[Cell, ...]]:
        for actor_id, work, age_s in self._held():
            yield work.id, work.held_s + age_s, work.quiet_s + age_s, work.tokens, _waits_for(work), actor_id

    def _waits(self) -> Iterator[tuple[Cell, ...]]:
        found: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
        for actor_id, work, age_s in self._held():
            found[_waits_for(work)].append((work.quiet_s + age_s, work.id, actor_id))
        for waits_for, works in found.items():
            longest_s, oldest, actor_id = max(works)
            yield waits_for, len(works), longest_s, oldest, actor_id
        for name, queue in self.status.queues.items() if self.status is not None else ():
            if queue["waiting"]:
                yield f"a {name} worker", queue["waiting"], None, "", ""

    def _findings(self) -> Iterator[tuple[Cell, ...]]:
        status = self.status
        if status is None:
            return
        for stall in status.stalls:
            yield None, stall.cause, stall.object, f"{stall.evidence}; {stall.advice}"
        for alert in status.alerts:
            yield None, "alert", alert.alert, f"since step {alert.step:,}: {alert.when}"
        for count, noun, last in (
            (status.trajectories_failed, "trajectories failed", status.last_failure),
            (status.messages_unreadable, "messages rejected", status.last_unreadable),
        ):
            if count:
                yield None, noun, f"{count:,}", last
        for event in status.events:
            if event.kind != "step":
                yield max(0.0, status.at_s - event.at_s), event.kind, "", event.text

    def _logs(self) -> Iterator[tuple[Cell, ...]]:
        for line in self.lines:
            clock = datetime.fromisoformat(line.time).astimezone().strftime("%H:%M:%S.%f")[:-3] if line.time else ""
            fields = " ".join(f"{name}={value}" for name, value in line.fields.items())
            yield clock, line.actor, line.level, f"{line.event}  {fields}"


def _state(actor: ActorStatus | None, age_s: float) -> str:
    if actor is None:
        return "live"
    return "silent" if actor.live and age_s > _SILENT_S else "live" if actor.live else "down"


def _doing(vitals: Vitals) -> str:
    if not vitals.doing.kind:
        return ""
    number = f" {vitals.doing.number}" if vitals.doing.number else ""
    seconds = vitals.values.get("doing_s")
    return f"{vitals.doing.kind}{number}{'' if seconds is None else f' for {duration(seconds)}'}"


def _waits_for(work: HeldWork) -> str:
    waiting = work.waiting
    version = f" {waiting.version}" if waiting.version else ""
    fault = f" after {waiting.fault}" if waiting.fault else ""
    return f"{waiting.on}{version} {waiting.name}".strip() + fault


def cell_text(column: Column, value: Cell) -> str:
    """Return a value as it is shown."""
    if value is None or isinstance(value, str):
        return value or ""
    return duration(value) if column.form == "time" else format(value, column.form)
