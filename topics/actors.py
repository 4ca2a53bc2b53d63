"""Messages about actors themselves, and the requests of operators."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from topics.roles import ROLE_NAMES, WORKERS
from topics.topic import ACTORS, BLOBS, DEAD, FLEET, LEDGER_BLOBS, STREAMS, VITALS, Stream, Topic
from topics.wire import Count, Headers, Id, Message, Sequence, Step

MOST_PROCESSES = 1024  # of one role
Processes: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_PROCESSES)]


class RunOpened(Message):
    """A run starts or continues, with the number of its steps."""

    steps: Count  # RL optimiser steps
    warmup_steps: Count
    settings: dict[str, Any]  # the config as it was resolved; it names files that hold secrets, never the secrets
    directory: str = ""  # of the run: for actors that share its files
    base: str = ""  # folder that relative paths of the settings start from
    inputs: dict[str, str] = msgspec.field(default_factory=dict)  # xxh3 of its code and data files, by path
    trained: Step = 0  # newest step trained before; later steps use these inputs


class ActorStarted(Message):
    """A process for a role has started, or restarts lost parts."""

    role: str
    actor_id: Id  # "rollout-2"
    host: str
    pid: Count
    lost: str = ""  # restarted parts and the reason; empty for a new process


class ActorStoppedHeaders(Headers):
    """Header that waiting for the end of a run needs."""

    again: bool = False


class ActorStopped(Message):
    """A process left its role; `reason` is empty when it was asked to."""

    HEADERS: ClassVar[type[Headers]] = ActorStoppedHeaders

    role: str
    actor_id: Id
    reason: str = ""
    denied: bool = False  # the server refused its login, or a subject that it needs
    pid: Count = 0
    again: bool = False  # another start may help


class ActorLeaving(Message):
    """A process was asked to leave, and serves until the next process of its name does."""

    role: str
    actor_id: Id
    pid: Count


class KeeperClaimed(Message):
    """From here on the writer named by the nonce keeps this log."""

    role: str
    actor_id: Id
    nonce: Id


class KeeperHeartbeat(Message):
    """The writer of this log lives."""

    nonce: Id


class KeeperSnapshot(Message):
    """Snapshot of the keeper's state and the stream positions it covers; the next start begins there."""

    format: Id  # of the state; another one cannot be read
    positions: dict[str, Count]  # sequence of the newest record folded, by stream
    state: bytes  # MessagePack


ScaledBy: TypeAlias = Literal[
    "start",  # the config, at the first start
    "command",  # a user, `asyncrl scale`
    "autoscale",  # the rule of `[autoscale]`
    "share",  # `asyncrl share`, by the weights of several runs
    "",  # nothing has changed it
]


class FleetScaled(Message):
    """The number of processes of each pool from here on; empty where a request named no pool of the run."""

    wanted: dict[str, Processes]
    by: ScaledBy = ""
    reason: str = ""
    request: Count = 0  # sequence of the `scale.requested` that is answered; 0: none


class ScaleRequested(Message):
    """Request to change the numbers of processes."""

    wanted: dict[str, Processes]
    by: ScaledBy = "command"
    reason: str = ""
    after: Count = 0  # with `by` autoscale or share: sequence of the `fleet.scaled` it depends on; void after any other


class AutoscaleFailed(Message):
    """The user's function that decides how many processes run gave no answer; empty: it answers again."""

    reason: str = ""


class StopRequested(Message):
    """Request to stop the run; open trajectories keep their progress."""

    reason: str = ""


class ReissueRequested(Message):
    """Request to issue a dropped prompt again as a new group."""

    prompt_id: Id  # "p000042", or "r000003" for its row once more


class SkipRequested(Message):
    """Request that the learner ends an untrainable batch with unchanged weights."""

    step: Step


WaitKind: TypeAlias = Literal[
    "function",  # for no other process: the user's function, or the grader, is at work
    "engine",  # for the answer of an engine
    "retry",  # to ask an engine again, which failed
    "version",  # for an engine with a version of the weights
    "tool",
    "reward",
    "evaluation",  # for answers and their rewards
    "publish",
    "turn",  # to run in its own process
    "isolated",  # for that process
]


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cause for which a piece of work waits."""

    on: WaitKind = "function"
    name: str = ""  # of the engine or tool
    version: Count = 0  # of the weights, or a newer one
    fault: str = ""  # of the engine, for people


class HeldWork(msgspec.Struct, omit_defaults=True):
    """A piece of work that an actor has had for seconds."""

    id: str  # "p000042-3"
    held_s: float  # since it was received
    quiet_s: float  # since it last came further
    waiting: Waiting = Waiting()
    tokens: int = 0  # sampled so far


class Activity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The current activity of an actor."""

    kind: Literal[
        "",
        "loading",
        "training",
        "publishing",
        "saving",
        "awaiting batch",
        "awaiting teacher",
        "awaiting card",
        "opening data",
        "making row",
        "standby",
        "taking over",
    ] = ""
    number: int = 0  # of the batch, checkpoint, row or turn


class Vitals(Message):
    """An actor's vital signs: gauges and counters by name, units in the names."""

    role: str
    actor_id: Id
    pid: Count
    at_s: float  # seconds since the epoch, the actor's clock
    values: dict[str, float]
    held: list[HeldWork] = msgspec.field(default_factory=list)  # the oldest few
    doing: Activity = Activity()  # for how long is in values as `doing_s`
    denied: str = ""  # the newest refusal of the server, verbatim
    sandbox_fault: str = ""  # of a rollout worker: why no sandbox starts; "" while they do


class WorkIsolated(Message):
    """A piece of work that came back again and again ended the process that had nothing else to do."""

    place: Id  # of its message: "PROMPTS-17"
    role: Id
    delivery: Count
    tries: Count  # how often it has done so since it last advanced, with this one
    at: Count  # sequence of its newest progress; 0: none
    how: str  # "exit code -9"


class BlobStored(Message):
    """One chunk of a message too large to travel inline; the bytes are the body, this is its description."""

    blob_id: str
    chunk: int


class DeadLetter(Message):
    """A message that could not be read, or that ended worker after worker (poison)."""

    topic: str
    stream: str
    sequence: Sequence
    reason: str
    headers: dict[str, str]
    body: bytes  # its beginning
    poison: bool = False  # it can be read, and ended worker after worker

    @property
    def place(self) -> str:
        """Return the key `GRADES-17`: one dead letter per message, whichever consumers reject it and however often."""
        return f"{self.stream}-{self.sequence}"


_ALL = ROLE_NAMES

RUN_OPENED = Topic(RunOpened, ACTORS, ("operator",), _ALL, repeats=True)
ACTOR_STARTED = Topic(ActorStarted, ACTORS, _ALL, ("supervisor",), key="actor_id")
ACTOR_STOPPED = Topic(ActorStopped, ACTORS, _ALL, ("supervisor", "recorder"), key="actor_id")
ACTOR_LEAVING = Topic(ActorLeaving, ACTORS, ("gateway",), ("supervisor",), key="actor_id")
SCALE_REQUESTED = Topic(ScaleRequested, ACTORS, ("operator", "supervisor"), ("supervisor",), repeats=True)
STOP_REQUESTED = Topic(StopRequested, ACTORS, ("operator", "supervisor"), ("supervisor",), repeats=True)
REISSUE_REQUESTED = Topic(ReissueRequested, ACTORS, ("operator",), ("prompter",), repeats=True)
SKIP_REQUESTED = Topic(SkipRequested, ACTORS, ("operator",), ("learner",), repeats=True)
FLEET_SCALED = Topic(FleetScaled, FLEET, ("supervisor",), ("supervisor",), repeats=True)
AUTOSCALE_FAILED = Topic(AutoscaleFailed, FLEET, ("supervisor",), ("supervisor",), repeats=True)
WORK_ISOLATED = Topic(WorkIsolated, ACTORS, WORKERS, WORKERS, key="place")
VITALS_TAKEN = Topic(Vitals, VITALS, _ALL, ("monitor", "supervisor"), key="actor_id", json=True, name="vitals.taken")
BLOB_STORED = Topic(BlobStored, BLOBS, _ALL, _ALL, key="blob_id")
BLOB_KEPT = Topic(BlobStored, LEDGER_BLOBS, _ALL, _ALL, key="blob_id", name="blob.kept")
DEAD_LETTER = Topic(DeadLetter, DEAD, _ALL, ("operator",), key="place", name="message.rejected")


def keeper_topics(stream: Stream) -> list[Topic[Message]]:
    """Return the topics by which a keeper's log records its writer, and that the writer lives; none for other logs."""
    role = stream.keeper
    kinds = (("claimed", KeeperClaimed), ("heartbeat", KeeperHeartbeat), ("snapshot", KeeperSnapshot))
    followers = (role,) if stream is FLEET else (role, "recorder")  # it follows these logs as a whole
    return [
        Topic(message, stream, (role,), followers, replaced=name == "snapshot", name=f"{role}.{name}")
        for name, message in (kinds if role else ())
    ]


KEEPER_TOPICS = [topic for stream in STREAMS for topic in keeper_topics(stream)]
SHARED_TYPES = (KeeperClaimed, KeeperHeartbeat, KeeperSnapshot, BlobStored)  # one type for several topics
