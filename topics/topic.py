"""The table of topics: what is said, where it is kept, who says it and who listens.

From this one table come the streams, the AsyncAPI document and docs/topics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import msgspec

from topics.wire import Message

M = TypeVar("M", bound=Message)

# A NATS server sends its answers to whatever reply subject a request names, and what a push consumer delivers to
# whatever subject its maker names, without a look at what either may publish. Two kinds of subject are safe from that:
# it takes no reply subject that begins with `_R_.`, and delivers only to a subject that somebody subscribes to in
# exactly these words. So streams listen to wildcards below `_R_.`, which no role may subscribe to.
_INGEST = "_R_"


class Keep(Enum):
    """How long a stream keeps its messages."""

    LEDGER = "ledger"  # no tokens; kept for the whole run
    PAYLOAD = "payload"  # tokens and bytes; trimmed once nothing needs them
    LAST = "last"  # the newest message of each subject


@dataclass(frozen=True)
class Stream:
    """A JetStream stream of a run."""

    name: str
    keep: Keep
    keeper: str = ""  # the one role that writes it, with compare-and-set on the stream's last sequence; "" for many
    about: str = ""

    def full_name(self, run: str) -> str:
        """Name on the server."""
        return f"ASYNCRL_{run}_{self.name}"

    def ingest(self, subjects: str) -> str:
        """Where messages are published that this stream stores under `subjects`."""
        return f"{_INGEST}.{self.name}.{subjects}"


@dataclass(frozen=True)
class Topic(Generic[M]):
    """A fact that can be said: its subject is `asyncrl.<run>.<noun>.<participle>[.<key>]`."""

    name: str  # "trajectory.generated"
    message: type[M]
    stream: Stream
    said_by: tuple[str, ...]
    heard_by: tuple[str, ...]  # besides the monitor and the warden, who may hear everything, and the log's own keeper
    key: str = ""  # what stands behind the participle: "trajectory_id"; "" for nothing
    json: bool = False  # JSON instead of MessagePack: read by other people's tools
    heads: type[msgspec.Struct] | None = None  # what the headers say, where folds read nothing else
    replaced: bool = False  # the newest one takes the place of those before: what they have stored as blobs is purged

    def subject(self, run: str, key: str = "") -> str:
        """The subject that one message is stored under."""
        if bool(key) != bool(self.key):
            raise ValueError(f"topic {self.name} takes {'a key (' + self.key + ')' if self.key else 'no key'}")
        return f"asyncrl.{run}.{self.name}.{key}" if key else f"asyncrl.{run}.{self.name}"

    @property
    def blobs(self) -> Stream:
        """Where a body lies that is too large for one message: it is kept for as long as the message is needed."""
        kept = self.stream.keep is Keep.LEDGER and not self.replaced
        return LEDGER_BLOBS if kept else BLOBS

    def pattern(self, run: str) -> str:
        """The subjects of all its messages."""
        return f"asyncrl.{run}.{self.name}.*" if self.key else f"asyncrl.{run}.{self.name}"

    def ingest(self, run: str, key: str = "") -> str:
        """The subject that one message is published to."""
        return self.stream.ingest(self.subject(run, key))


PROMPTS = Stream("PROMPTS", Keep.LEDGER, "prompter", "prompts issued: the work queue of the rollout workers")
TRAJECTORIES = Stream("TRAJECTORIES", Keep.PAYLOAD, "", "tokens: progress and results, one fence per trajectory")
GRADES = Stream("GRADES", Keep.LEDGER, "", "grades and claims of failure")
BATCHES = Stream("BATCHES", Keep.LEDGER, "buffer", "batches and ends")
TRAINING = Stream("TRAINING", Keep.LEDGER, "learner", "steps, versions, checkpoints")
ENGINES = Stream("ENGINES", Keep.LEDGER, "", "what inference servers say of themselves")
EVALS = Stream("EVALS", Keep.LEDGER, "", "results of evaluations")
FLEET = Stream("FLEET", Keep.LEDGER, "warden", "how many actors play each role")
ACTORS = Stream("ACTORS", Keep.LEDGER, "", "actors' lives, and what people ask of the run")
VITALS = Stream("VITALS", Keep.LAST, "", "each actor's newest vital signs")
BLOBS = Stream("BLOBS", Keep.PAYLOAD, "", "chunks of tokens and snapshots too large to travel inline")
LEDGER_BLOBS = Stream("LEDGER_BLOBS", Keep.LEDGER, "", "chunks of ledger messages too large to travel inline")
DEAD = Stream("DEAD", Keep.LEDGER, "", "messages nobody could read, and poison")

STREAMS: tuple[Stream, ...] = (
    PROMPTS,
    TRAJECTORIES,
    GRADES,
    BATCHES,
    TRAINING,
    ENGINES,
    EVALS,
    FLEET,
    ACTORS,
    VITALS,
    BLOBS,
    LEDGER_BLOBS,
    DEAD,
)
