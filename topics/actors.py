"""What is said about actors themselves, and what people ask of a run."""

from __future__ import annotations

from typing import Any

from topics.topic import ACTORS, BATCHES, BLOBS, DEAD, FLEET, PROMPTS, TRAINING, VITALS, Topic
from topics.wire import Message


class RunOpened(Message):
    """A run begins, or goes on after a stop or a crash: how far it shall go."""

    steps: int  # RL optimiser steps
    warmup_steps: int
    settings: dict[str, Any]  # the cast as it was resolved; it names files that hold secrets, never the secrets


class ActorStarted(Message):
    """A process plays a role."""

    role: str
    actor_id: str  # "rollout-2"
    host: str
    pid: int


class ActorStopped(Message):
    """A process left its role; `reason` is empty when it was asked to."""

    role: str
    actor_id: str
    reason: str = ""


class KeeperClaimed(Message):
    """From here on the writer named by the nonce keeps this log."""

    role: str
    actor_id: str
    nonce: str


class KeeperBeat(Message):
    """The writer of this log lives."""

    nonce: str


class FleetScaled(Message):
    """How many processes play each role from here on."""

    wanted: dict[str, int]


class ScaleRequested(Message):
    """Somebody asks for other numbers of processes."""

    wanted: dict[str, int]


class StopRequested(Message):
    """Somebody asks the run to stop; open trajectories keep their progress."""

    reason: str = ""


class Vitals(Message):
    """An actor's vital signs: gauges and counters by name, units in the names."""

    role: str
    actor_id: str
    pid: int
    at_s: float  # seconds since the epoch, the actor's clock
    values: dict[str, float]


class BlobStored(Message):
    """One chunk of a message too large to travel inline; the bytes are the body, this is its description."""

    blob_id: str
    chunk: int


class DeadLetter(Message):
    """A message that could not be read."""

    topic: str
    stream: str
    sequence: int
    reason: str
    headers: dict[str, str]
    body: bytes


_ALL = ("prompter", "rollout", "reward", "buffer", "learner", "engine", "evaluator", "recorder", "warden")

RUN_OPENED = Topic(
    "run.opened", RunOpened, ACTORS, said_by=("operator",), heard_by=("warden", "buffer", "recorder", "monitor")
)
ACTOR_STARTED = Topic("actor.started", ActorStarted, ACTORS, said_by=_ALL, heard_by=("warden",), key="actor_id")
ACTOR_STOPPED = Topic(
    "actor.stopped", ActorStopped, ACTORS, said_by=_ALL, heard_by=("warden", "recorder"), key="actor_id"
)
SCALE_REQUESTED = Topic("control.scaled", ScaleRequested, ACTORS, said_by=("operator",), heard_by=("warden",))
STOP_REQUESTED = Topic("control.stopped", StopRequested, ACTORS, said_by=("operator",), heard_by=("warden",))
FLEET_SCALED = Topic("fleet.scaled", FleetScaled, FLEET, said_by=("warden",), heard_by=("warden", "recorder"))
VITALS_TAKEN = Topic(
    "vitals.taken", Vitals, VITALS, said_by=_ALL, heard_by=("monitor", "recorder"), key="actor_id", json=True
)
BLOB_STORED = Topic("blob.stored", BlobStored, BLOBS, said_by=_ALL, heard_by=_ALL, key="blob_id")
DEAD_LETTER = Topic("dead.kept", DeadLetter, DEAD, said_by=_ALL, heard_by=("operator",), key="actor_id")


def _keeper_topics() -> tuple[Topic[Any], ...]:
    """Each keeper's log holds who keeps it, and that the keeper lives."""
    topics: list[Topic[Any]] = []
    for stream in (PROMPTS, BATCHES, TRAINING, FLEET):
        role = stream.keeper
        topics.append(Topic(f"{role}.claimed", KeeperClaimed, stream, said_by=(role,), heard_by=(role,)))
        topics.append(Topic(f"{role}.beat", KeeperBeat, stream, said_by=(role,), heard_by=(role,)))
    return tuple(topics)


KEEPER_TOPICS = _keeper_topics()

TOPICS: tuple[Topic[Any], ...] = (
    RUN_OPENED,
    ACTOR_STARTED,
    ACTOR_STOPPED,
    SCALE_REQUESTED,
    STOP_REQUESTED,
    FLEET_SCALED,
    VITALS_TAKEN,
    BLOB_STORED,
    DEAD_LETTER,
    *KEEPER_TOPICS,
)
