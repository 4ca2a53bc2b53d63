"""The table of topics: message, stream, publishers and subscribers.

From this one table come the streams, the AsyncAPI document and docs/reference/topics.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from topics.ids import stage_of
from topics.wire import Message

M = TypeVar("M", bound=Message, covariant=True)

# A NATS server sends answers to any reply subject that a request names, and messages of a push consumer to any subject
# that its creator names, without checking permissions. Two kinds of subject are safe from that: it accepts no reply
# subject that begins with `_R_.`, and delivers only to a subject that a client subscribes to literally. So streams
# listen to wildcards below `_R_.`, which no role may subscribe to.
_INGEST = "_R_"
EVALUATIONS = "eval"  # token of subjects


class Retention(Enum):
    """The time for which a stream keeps its messages."""

    LEDGER = "ledger"  # no tokens; kept for the whole run
    PAYLOAD = "payload"  # tokens and bytes; trimmed once nothing needs them
    LAST = "last"  # the newest message of each subject


@dataclass(frozen=True)
class Stream:
    """A JetStream stream of a run."""

    name: str
    keep: Retention
    keeper: str = ""  # the one role that writes it, with compare-and-set on the stream's last sequence; "" for many
    about: str = ""
    closed: bool = False  # the monitor reads it neither: only those whose rows name it

    def full_name(self, run: str) -> str:
        """Name on the server."""
        return f"ASYNCRL_{run}_{self.name}"

    def ingest(self, subjects: str) -> str:
        """Return the subjects to publish to for messages that this stream stores under `subjects`."""
        return f"{_INGEST}.{self.name}.{subjects}"


@dataclass(frozen=True, eq=False)
class Topic(Generic[M]):
    """A kind of message: its subject is `asyncrl.<run>.<noun>.<participle>[.<key>]`."""

    message: type[M]
    stream: Stream
    publishers: Sequence[str]
    # in addition to the keeper of the log, monitor and supervisor, which may read everything
    subscribers: Sequence[str]
    key: str = ""  # the field after the participle: "trajectory_id"; "" for none
    json: bool = False  # JSON instead of MessagePack: read by other people's tools
    replaced: bool = False  # a newer message replaces older ones, and their blobs are purged
    id: tuple[str, ...] = ()  # fields of the message id in addition to the content digest; empty: the key
    fenced: bool = False  # each message of a key is appended only after the newest one that its worker knows
    lane: bool = False  # messages of evaluations have one more token before their key, for a separate work queue
    pooled: bool = False  # messages about tasks of a pool of workers have its name before their key
    repeats: bool = False  # each publish is a new message; otherwise equal content is stored once in two minutes
    name: str = ""  # else that of the message's type: "trajectory.generated" of TrajectoryGenerated

    def __post_init__(self) -> None:
        """Derive the name from the message unless one is given."""
        words = re.findall("[A-Z][^A-Z]*", self.message.__name__)
        object.__setattr__(self, "name", self.name or ".".join(words).lower())

    def key_of(self, message: Message) -> str:
        """The key that a message of this topic is stored under."""
        return str(getattr(message, self.key)) if self.key else ""

    def id_of(self, message: Message) -> str:
        """Return `<topic>:<id>`, which a message id begins with."""
        names = self.id or ((self.key,) if self.key else ())
        return ":".join([self.name, *(str(getattr(message, name)) for name in names)])

    def subject(self, run: str, key: str = "", pool: str = "") -> str:
        """The subject that one message is stored under.

        Args:
            run: its id.
            key: of the message.
            pool: of the workers whose task it is about, see `topics.table.Tables.pool_name`.
        """
        if bool(key) != bool(self.key):
            raise ValueError(f"topic {self.name} takes {'a key (' + self.key + ')' if self.key else 'no key'}")
        lane = f"{EVALUATIONS}." if self.lane and stage_of(key) == "eval" else ""
        pool = f"{pool}." if pool else ""
        return f"asyncrl.{run}.{self.name}.{lane}{pool}{key}" if key else f"asyncrl.{run}.{self.name}"

    @property
    def blobs(self) -> Stream:
        """Return the stream of bodies too large for one message: they are kept as long as the message is needed."""
        kept = self.stream.keep is Retention.LEDGER and not self.replaced
        return LEDGER_BLOBS if kept else BLOBS

    def pattern(self, run: str) -> str:
        """The subjects of all its messages."""
        if self.lane or self.pooled:
            return f"asyncrl.{run}.{self.name}.>"
        return f"asyncrl.{run}.{self.name}.*" if self.key else f"asyncrl.{run}.{self.name}"

    def fence(self, run: str, key: str, pool: str = "") -> str:
        """The subjects of all messages about a key of its noun; arguments as of `subject`."""
        return f"asyncrl.{run}.{self.name.partition('.')[0]}.*.{f'{pool}.' if pool else ''}{key}"

    def ingest(self, run: str, key: str = "") -> str:
        """The subject that one message is published to."""
        return self.stream.ingest(self.subject(run, key))


PROMPTS = Stream("PROMPTS", Retention.LEDGER, "prompter", "prompts issued: the work queue of the rollout workers")
TRAJECTORIES = Stream("TRAJECTORIES", Retention.PAYLOAD, "", "tokens: progress and results, one fence per trajectory")
GRADES = Stream("GRADES", Retention.LEDGER, "", "grades and claims of failure")
BATCHES = Stream("BATCHES", Retention.LEDGER, "buffer", "batches, ends and scores of evaluations")
TRAINING = Stream("TRAINING", Retention.LEDGER, "learner", "steps, versions, checkpoints")
ENGINES = Stream("ENGINES", Retention.LEDGER, "", "the state of inference servers")
FLEET = Stream("FLEET", Retention.LEDGER, "supervisor", "how many actors run each role")
ACTORS = Stream("ACTORS", Retention.LEDGER, "", "starts and ends of actors, and requests of operators")
VITALS = Stream(
    "VITALS", Retention.LAST, "", "newest vital signs of each actor, and requests of each engine for weights in memory"
)
HISTORY = Stream("HISTORY", Retention.LEDGER, "", "the state of the run over time, thinned with age")
BLOBS = Stream("BLOBS", Retention.PAYLOAD, "", "chunks of tokens and snapshots too large to travel inline")
WEIGHTS = Stream("WEIGHTS", Retention.PAYLOAD, "", "chunks of weights, where hosts share no folder")
LEDGER_BLOBS = Stream("LEDGER_BLOBS", Retention.LEDGER, "", "chunks of ledger messages too large to travel inline")
TURNS = Stream("TURNS", Retention.LEDGER, "", "turns of live traffic with their tokens, and judgements of them")
SESSIONS = Stream("SESSIONS", Retention.LEDGER, "sessions", "turns to judge and to train, and ends of sessions")
SECRETS = Stream("SECRETS", Retention.LEDGER, "", "data keys of live traffic, until they are erased", closed=True)
DEAD = Stream("DEAD", Retention.LEDGER, "", "unreadable messages, and poison")

STREAMS = tuple(one for one in list(vars().values()) if isinstance(one, Stream))
