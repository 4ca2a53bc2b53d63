"""The violations that an audit finds; and the check of a keeper's log: it has one writer, which claims it first."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from asyncrl.bus.log import Record
from asyncrl.bus.publish import BY, WRITER
from topics.actors import KeeperClaimed, KeeperHeartbeat
from topics.gpu_handoff import CardRequested
from topics.topic import Topic
from topics.wire import Headers, Message

Kind: TypeAlias = Literal[
    "issued twice",
    "left out",
    "never issued",
    "wrong origin",
    "wrong row",
    "wrong seed",
    "wrong rules",
    "wrong evaluation",
    "wrong objective",
    "ended twice",
    "in two batches",
    "no end",
    "lost",
    "hidden loss",
    "left over",
    "overdue",
    "dropped without cause",
    "wrong queue",
    "generated twice",
    "not graded",
    "graded late",
    "second grade",
    "completed twice",
    "wrong reference",
    "damaged payload",
    "wrong tokens",
    "packed twice",
    "trained twice",
    "step out of order",
    "wrong batch",
    "wrong size",
    "unasked skip",
    "wrong stage",
    "unasked stage",
    "wrong bound",
    "bound changed",
    "beyond lag bound",
    "more tokens than sampled",
    "fewer tokens than sampled",
    "wrong rewards",
    "wrong level",
    "unpublished version",
    "below min_version",
    "wrong version",
    "untrained version",
    "two digests",
    "repeated version",
    "foreign weights",
    "unasked promotion",
    "wrong checkpoint",
    "unknown lineage",
    "admitted twice",
    "unknown turn",
    "not to be trained",
    "foreign tokens",
    "foreign writer",
    "unreadable record",
]


class Violation(NamedTuple):
    """Something a run's topics hold that must not be."""

    kind: Kind
    id: str  # of the trajectory, prompt, batch, version or message
    found: str
    expected: str


class Violations(list[Violation]):
    """All that was found."""

    def add(self, kind: Kind, id: object, found: str, expected: str) -> None:
        """Note one."""
        self.append(Violation(kind, str(id), found, expected))


class Writers:
    """The newest claim of every keeper's log."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations
        self._claimed: dict[str, str] = {}  # writer by log
        self.claimed_ns: dict[str, int] = {}  # server's clock at its claim, by log

    def check(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        """Note a record of a keeper's log that is not by the writer that had claimed the log."""
        log, writer = record.stream.name, record.headers.get(WRITER, "")
        by_headers = isinstance(message, Headers) and topic.message is KeeperClaimed
        if by_headers or (isinstance(message, KeeperClaimed) and message.nonce == writer):
            self._claimed[log], self.claimed_ns[log] = writer, record.time_ns
        # A heartbeat decides nothing: it also keeps other standby processes away while one prepares to claim the log,
        # which may need the GPU.
        if record.stream.keeper and topic.message not in (KeeperHeartbeat, CardRequested) and not self.owns(record):
            holder = self._claimed.get(log)
            found = f"{topic.name} of writer {writer} ({record.headers.get(BY, 'no writer named')})"
            expected = f"writer {holder}, which claimed the log last" if holder else "a claim of the log before it"
            self._violations.add("foreign writer", place_of(record), found, expected)

    def owns(self, record: Record) -> bool:
        """Return whether a record is by the writer that claimed its log last."""
        return record.headers.get(WRITER, "") == self._claimed.get(record.stream.name)


def place_of(record: Record) -> str:
    """`message 17 of BATCHES`."""
    return f"message {record.sequence} of {record.stream.name}"
