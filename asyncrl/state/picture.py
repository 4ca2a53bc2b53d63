"""The state of a run at one moment: its topics, its server, and this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    DEAD_LETTER,
    FLEET_SCALED,
    RUN_OPENED,
    STOP_REQUESTED,
    VITALS_TAKEN,
    HeldWork,
    Vitals,
)
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.groups import GROUP_DROPPED
from topics.stalls import STALL_ENDED, STALL_FOUND, StallFound
from topics.topic import Topic
from topics.weights import TRAINING_FINISHED, WEIGHTS_PUBLISHED

Process: TypeAlias = Literal["", "stopped", "gone"]  # "": lives, or is on another machine

_RECENT = 8  # steps that a run's pace is taken from
_SOON_S = 60.0  # starts that count as one trouble lie within this


@dataclass
class Actor:
    """One process of a role. Times are the server's clock, nanoseconds since the epoch."""

    actor_id: str
    role: str
    host: str = ""
    pid: int = 0
    starts: list[int] = field(default_factory=list)
    stopped_ns: int = 0
    last_error: str = ""  # of its newest start that ended with a reason
    denied: bool = False  # that was a refusal of the server
    vitals: Vitals | None = None  # of this start
    seen_ns: int = 0
    process: Process = ""

    @property
    def live(self) -> bool:
        """Return whether it began after it last ended."""
        return bool(self.starts) and self.starts[-1] > self.stopped_ns

    @property
    def since_ns(self) -> int:
        """Return the time it was last seen."""
        return max(self.seen_ns, self.starts[-1] if self.starts else 0)

    def gauge(self, name: str) -> float | None:
        """One of its vital signs."""
        return self.vitals.values.get(name) if self.vitals is not None else None

    def ago_s(self, name: str) -> float:
        """Seconds between a moment that its vital signs name and those signs themselves; 0 where they name none."""
        at_s = self.gauge(name)
        return self.vitals.at_s - at_s if self.vitals is not None and at_s is not None else 0.0

    def quick_starts(self, now_ns: int, opened_ns: int) -> int:
        """Return how often it was started lately, since the run was opened: starts by the owner do not count."""
        return sum(now_ns - start < _SOON_S * 1e9 and start >= opened_ns for start in self.starts)


@dataclass
class Engine:
    """The state that an inference server published."""

    engine_id: str
    address: str = ""
    version: int | None = None  # newest that it took requests with
    update_s: float = 0.0
    ready_ns: int = 0
    updating: int | None = None  # newest version that it began to take
    updating_ns: int = 0
    gone_ns: int = 0
    reason: str = ""  # why it is gone
    found: str = ""  # name of weights that another client gave it
    found_ns: int = 0

    @property
    def state(self) -> Literal["ready", "updating", "gone"]:
        """Return the state by its newest message."""
        newest = max(self.ready_ns, self.updating_ns, self.gone_ns)
        return "gone" if newest == self.gone_ns else "ready" if newest == self.ready_ns else "updating"


class Step(NamedTuple):
    """One optimiser step."""

    step: int
    stage: str
    time_ns: int
    train_s: float
    spread: float  # standard deviation of the rewards of its batch


class Letter(NamedTuple):
    """A message that was rejected."""

    topic: str
    reason: str
    time_ns: int


class Disk(NamedTuple):
    """A file system that the run writes to."""

    path: str
    free: int  # bytes
    total: int


@dataclass
class Picture:
    """A run at one moment. What is not known is empty."""

    run: str
    now_ns: int = 0  # server's clock
    config: Config = field(default_factory=Config)
    opened_ns: int = 0
    actors: dict[str, Actor] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    scaled_ns: int = 0  # when that was requested
    engines: dict[str, Engine] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)  # the newest few, each once
    packed: int | None = None  # newest batch
    packed_ns: int = 0
    published: int | None = None  # newest version
    published_ns: int = 0
    finished_at: int | None = None  # step at which training was reported finished
    stopping: bool = False
    drops: dict[str, int] = field(default_factory=dict)  # groups dropped since the newest batch, by reason
    letters: list[Letter] = field(default_factory=list)  # the newest few
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    queues: dict[str, dict[str, int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # group mates of long-held trajectories that have a grade or failed
    disks: list[Disk] = field(default_factory=list)
    stalls: dict[tuple[str, str], StallFound] = field(default_factory=dict)  # found before, and not ended
    unreachable: str = ""  # why the server cannot be asked
    denied: str = ""  # topics that this user may not read

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in; of `batch.packed` the headers are enough."""
        if topic is BATCH_PACKED:
            self.packed, self.packed_ns = int(record.headers["step"]), record.time_ns
        elif topic is BATCH_TRAINED:
            seconds = message.metrics.get("train_s", 0.0)
            step = Step(message.step, message.stage, record.time_ns, seconds, message.rewards[1])
            self.steps = [*(known for known in self.steps if known.step < step.step), step][-_RECENT:]
        elif topic is WEIGHTS_PUBLISHED:
            self.published, self.published_ns = message.version, record.time_ns
        elif topic is TRAINING_FINISHED:
            self.finished_at = message.step
        elif topic is GROUP_DROPPED:
            self.drops[message.reason] = self.drops.get(message.reason, 0) + 1
        elif topic is DEAD_LETTER:
            self.letters.append(Letter(message.topic, message.reason, record.time_ns))
        elif topic is STALL_FOUND:
            self.stalls[message.cause, message.object] = message
        elif topic is STALL_ENDED:
            self.stalls.pop((message.cause, message.object), None)
        elif topic in (ENGINE_READY, ENGINE_UPDATING, ENGINE_GONE):
            self._on_engine(topic, message, record.time_ns)
        else:
            self._on_start_or_stop(topic, message, record.time_ns)

    @property
    def now_s(self) -> float:
        """Server's clock, seconds."""
        return self.now_ns / 1e9

    @property
    def finished(self) -> bool:
        """Return whether training is over: a run that was made longer has finished before and goes on."""
        return self.finished_at is not None and self.finished_at >= self.config.learner.steps

    @property
    def trained(self) -> int:
        """Newest step in the weights."""
        return self.steps[-1].step if self.steps else self.config.origin

    def since_s(self, time_ns: int) -> float:
        """Seconds between a moment of the server's clock and now."""
        return (self.now_ns - time_ns) / 1e9

    def of_role(self, role: str) -> list[Actor]:
        """Actors of a role that are wanted."""
        count = self.wanted.get(role, 1)
        names = [f"{role}-{number}" for number in range(1, count + 1)]
        return [self.actors[name] for name in names if name in self.actors and self.actors[name].starts]

    def held(self, role: str) -> list[tuple[Actor, HeldWork]]:
        """Work that actors of a role have had for seconds, the oldest first."""
        found = [(actor, work) for actor in self.of_role(role) if actor.vitals for work in actor.vitals.held]
        return sorted(found, key=lambda entry: -entry[1].held_s)

    def gauge(self, role: str, name: str) -> float | None:
        """A gauge of the keeper of this role that folded most lately."""
        known = [actor for actor in self.of_role(role) if actor.gauge(name) is not None]
        return max(known, key=lambda actor: actor.seen_ns).gauge(name) if known else None

    def _on_engine(self, topic: Topic[Any], message: Any, time_ns: int) -> None:
        engine = self.engines.setdefault(message.engine_id, Engine(message.engine_id))
        if topic is ENGINE_READY:
            engine.address, engine.version = message.address, message.version
            engine.update_s, engine.ready_ns = message.update_s, time_ns
        elif topic is ENGINE_UPDATING:
            engine.updating, engine.updating_ns = message.version, time_ns
            if message.found:
                engine.found, engine.found_ns = message.found, time_ns
        else:
            engine.gone_ns, engine.reason = time_ns, message.reason

    def _on_start_or_stop(self, topic: Topic[Any], message: Any, time_ns: int) -> None:
        if topic is RUN_OPENED:
            self.opened_ns, self.stopping = time_ns, False
            self.config = msgspec.convert(message.settings, Config)
        elif topic is STOP_REQUESTED:
            self.stopping = True
        elif topic is FLEET_SCALED:
            self.wanted.update(message.wanted)
            self.scaled_ns = time_ns
        elif topic is ACTOR_STARTED:
            actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role))
            actor.host, actor.pid = message.host, message.pid
            actor.starts.append(time_ns)
        elif topic is ACTOR_STOPPED:
            actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role))
            actor.stopped_ns, actor.last_error = time_ns, message.reason or actor.last_error
            actor.denied = message.denied if message.reason else actor.denied
        elif topic is VITALS_TAKEN:
            actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role))
            actor.seen_ns = time_ns
            actor.vitals = message if message.pid == actor.pid else None
