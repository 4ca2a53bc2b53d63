"""The messages of one group: its issues, results, failures and ends, until it is complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import xxhash

from asyncrl.bus.log import Record
from topics.batches import BatchMember
from topics.evals import EvalRequested, EvalScored
from topics.ids import Stage, member_of, number_of, prompt_of, stage_of
from topics.prompts import PromptRow
from topics.table import Tables
from topics.topic import BATCHES, PROMPTS, TRAJECTORIES
from topics.trajectories import (
    Outcome,
    TrajectoryGenerated,
    TrajectoryGeneratedHeaders,
    TrajectoryGraded,
    VersionCount,
    count_versions,
)

_EARLY = ("deadline", "surplus")  # reasons of ends of members that may have no result

End: TypeAlias = int | str | EvalScored  # the batch or evaluation that holds it, or the reason it was dropped for


class Key(NamedTuple):
    """An attempt at a trajectory."""

    trajectory_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.trajectory_id} (attempt {self.attempt})" if self.attempt else self.trajectory_id

    @property
    def prompt_id(self) -> str:
        """`p000042`."""
        return prompt_of(self.trajectory_id)

    @property
    def member(self) -> int:
        """Its number in the group."""
        return member_of(self.trajectory_id)


class Issue(NamedTuple):
    """An attempt that was issued."""

    sequence: int
    min_version: int
    rows: str | None = None  # digest of its rows; "" without rows, None if they were not read


class Claim(NamedTuple):
    """A grade, or a failure, in the order of the log."""

    time_ns: int
    grade: TrajectoryGraded | None  # None: a failure
    reason: str = ""  # of a failure


class Together(NamedTuple):
    """Members that one call of a reward function grades."""

    group_id: str
    sequence: int  # of the message that asks for it
    keys: tuple[Key, ...]  # by member number


class Drop(NamedTuple):
    """The end of an attempt or of a group without a batch."""

    reason: str
    time_ns: int
    step: int  # of the batch that would have been packed next
    scores: tuple[float, ...] = ()  # of a group that a filter dropped, as its end has them


class Stored(NamedTuple):
    """A result in the payload stream."""

    key: Key
    versions: str  # as its header has them: "3:120,4:17"
    digest: str  # "" where its body was not read
    size: int
    fault: str = ""  # fault of its body
    rows: str = ""  # digest of the rows it was made from; "" without rows, or if they were not read
    reward: float | None = None  # that its rollout function gave, if its body was read
    turn_rewards: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()  # tokens of its segments


class Work(NamedTuple):
    """An open attempt, and the message that is the next work on it."""

    key: Key
    role: str  # the role whose turn it is
    stream: str
    sequence: int

    def queue(self, tables: Tables, task: str) -> str:
        """Name of the work queue that has it.

        Args:
            tables: of the run.
            task: of its group.
        """
        queues = tables.queues_for(self.role, task)
        return queues[-1 if stage_of(self.key.trajectory_id) == "eval" else 0].name if queues else ""


class Rules(NamedTuple):
    """The rules that a group was issued with, and that its batch names for the learner."""

    task: str
    temperature: float
    estimator: str

    def __str__(self) -> str:
        return f"task {self.task}, temperature {self.temperature:g}, estimator {self.estimator}"


class Group:
    """All trajectories of one prompt."""

    def __init__(self, prompt_id: str) -> None:
        self.prompt_id = prompt_id
        self.size = 0  # members; 0 before an issue was read
        self.wanted = 0  # members that are trained; 0: all
        self.issued_ns = 0  # server's clock at the first issue; of an evaluation at the newest
        self.issues: dict[Key, Issue] = {}
        self.rules: Rules | None = None  # by its first issue
        self.packed_rules: Rules | None = None  # by its batch
        self.claims: dict[Key, list[Claim]] = {}
        self.results: list[int] = []  # their sequences
        self.torn: dict[int, tuple[Key, str]] = {}  # results whose body is incomplete, by sequence
        self.generated: dict[Key, int] = {}  # sequence of the result
        self.submitted: set[Key] = set()  # results whose reward needs the whole group
        self.completed: dict[Key, Together] = {}  # those that one call grades with them
        self.completed_ns = 0  # server's clock at the newest of these
        self.scores: dict[str, list[float | None]] = {}  # grades of one call, by the name of the graded attempt
        self.ends: dict[Key, End] = {}
        self.drops: dict[Key, Drop] = {}  # of single members
        self.dropped: Drop | None = None  # of the group
        self.again: set[Key] = set()  # attempts that are to be issued because the one before was dropped
        self.end: End | None = None  # of the group
        self.requested: EvalRequested | None = None  # of an evaluation
        self.scored_ns = 0  # server's clock at the score of an evaluation
        self.packed: dict[Key, BatchMember] = {}
        self.further: set[int] = set()  # members that were open when a batch took it, and continue
        self.secrets = ""  # its data keys
        self.purged = False  # one of them was erased

    @property
    def stage(self) -> Stage:
        """By the letter of its name."""
        return stage_of(self.prompt_id)

    @property
    def number(self) -> int:
        """Its place among those of its letter."""
        return number_of(self.prompt_id)

    @property
    def issued(self) -> bool:
        """Return whether all members are."""
        return 0 < self.size <= sum(not key.attempt for key in self.issues)

    @property
    def whole(self) -> bool:
        """Return whether all members are issued, and all that its ends are about was read."""
        if not self.issued or self.continues:
            return False
        claimed = [*self.packed, *(key for key, drop in self.drops.items() if drop.reason not in _EARLY)]
        if not all(key in self.issues and key in self.claims for key in claimed):
            return False
        return self.dropped is None or self.dropped.reason in ("deadline", "purged") or self.complete_ns() is not None

    @property
    def continues(self) -> bool:
        """Return whether members continue after a batch took the others."""
        return not self.further <= {key.member for key in self.ends}

    def complete_ns(self) -> int | None:
        """Server's clock when every member had a grade, a failure or an end; None while one is open."""
        least, times = self._least_attempts(), {}
        for key, claims in self.claims.items():
            if key.attempt >= least.get(key.member, 0):
                times[key.member] = claims[0].time_ns
        for key in self.ends:
            if key._replace(attempt=key.attempt + 1) not in self.again:
                times[key.member] = self.drops[key].time_ns if key in self.drops else 0
        if not self.size or not all(member in times for member in range(self.size)):
            return None
        return max(times.values())

    def live(self, before_ns: float = math.inf) -> dict[int, TrajectoryGraded]:
        """The grades that may be trained on and were stored before a moment, by member."""
        least, newest = self._least_attempts(), dict[int, Key]()
        for key in sorted(self.claims.keys() & self.issues.keys()):
            if key.attempt >= least.get(key.member, 0) and self.claims[key][0].time_ns < before_ns:
                newest[key.member] = key
        gone = {key.member for key in self.drops if key._replace(attempt=key.attempt + 1) not in self.again}
        grades = {member: self.claims[key][0].grade for member, key in newest.items() if member not in gone}
        return {member: grade for member, grade in grades.items() if grade is not None}

    def _least_attempts(self) -> dict[int, int]:
        """The attempt from which on they count, by member that was to be issued again."""
        least: dict[int, int] = {}
        for key in self.again:
            least[key.member] = max(key.attempt, least.get(key.member, 0))
        return least

    def end_of(self, key: Key) -> End | None:
        """The end of an attempt, its own or its group's."""
        return self.ends.get(key, None if key.member in self.further else self.end)

    def open(self) -> Iterator[Work]:
        """The work on attempts that were issued and have no end."""
        for key, issue in self.issues.items():
            if self.end_of(key) is None:
                if key in self.claims:
                    yield Work(key, "buffer", "", 0)
                elif key in self.submitted:
                    yield from self._group_work(key)
                elif key in self.generated:
                    yield Work(key, "reward", TRAJECTORIES.name, self.generated[key])
                else:
                    yield Work(key, "rollout", PROMPTS.name, issue.sequence)

    def _group_work(self, key: Key) -> Iterator[Work]:
        """The work on a member that is to be graded with its group: one message for all of them."""
        if key not in self.completed:
            yield Work(key, "buffer", "", 0)
            return
        together = self.completed[key]
        still = (one for one in together.keys if one not in self.claims and self.end_of(one) is None)
        if key == next(still, None):
            yield Work(key, "groupreward", BATCHES.name, together.sequence)

    def used(self, key: Key, member: BatchMember) -> TrajectoryGraded | None:
        """The grade that a batch took over, or None without such a grade; a reward may be overruled."""
        names = ("payload", *(() if member.overruled else ("reward",)), "unshaped", "turn_rewards")
        for _, grade, _ in self.claims.get(key, []):
            if grade is not None and all(getattr(grade, name) == getattr(member, name) for name in names):
                return grade
        return None


def key_of_member(member: BatchMember) -> Key:
    """The attempt that a batch holds."""
    return Key(member.trajectory_id, member.attempt)


def end_text(end: End) -> str:
    """`batch 3`, `evaluation e000003`, or `dropped (lag)`."""
    if isinstance(end, EvalScored):
        return f"evaluation {end.eval_id}"
    return f"batch {end}" if isinstance(end, int) else f"dropped ({end})"


def digest_of(rows: Sequence[PromptRow]) -> str:
    """Identity of rows; "" for none."""
    return str(xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(rows))) if rows else ""


def stored_of(key: Key, message: TrajectoryGenerated | TrajectoryGeneratedHeaders, record: Record) -> Stored:
    """Return the part of a result that the audit keeps."""
    versions = message.by_version
    if isinstance(message, TrajectoryGeneratedHeaders):
        return Stored(key, versions, "", 0)
    counted = versions_text(count_versions(message.segments))
    fault = f"tokens of versions {counted}" if counted != versions else ""
    digest = xxhash.xxh3_64_hexdigest(record.data)
    given = message.outcome or Outcome()
    of_rows, turns = digest_of(message.rows), tuple(given.turn_rewards)
    lengths = tuple(len(segment.tokens) for segment in message.segments)
    return Stored(key, versions, digest, len(record.data), fault, of_rows, given.reward, turns, lengths)


def versions_text(counts: Sequence[VersionCount]) -> str:
    """Tokens per version as the header of a result has them: `3:120,4:17`."""
    return ",".join(f"{count.version}:{count.tokens}" for count in counts)
