"""Messages about trajectories: progress, result, failure, grade, end."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from topics.ids import Stage
from topics.payload_refs import ROUTING, Experts, Holding, Routing
from topics.prompts import ONLY_TASK, Attempt, GroupSize, Member, PromptIssued, PromptRow
from topics.topic import BATCHES, GRADES, TRAJECTORIES, Topic
from topics.values import check_range, checked_logprobs
from topics.wire import (
    Count,
    Float32Array,
    Headers,
    Id,
    Int32Array,
    Message,
    Real,
    SecretIds,
    Sequence,
    UInt8Array,
    Version,
)

FailureReason: TypeAlias = Literal["rollout", "reward", "diverged", "poison", "refused", "purged", "environment"]
DropReason: TypeAlias = Literal[
    "rollout", "reward", "diverged", "poison", "refused", "purged", "environment", "deadline", "lag", "surplus"
]


class Segment(msgspec.Struct, omit_defaults=True):
    """One row of tokens that is trained on. All arrays have one length T."""

    tokens: Int32Array  # [T] prompt, then sampled and observed tokens; "<i4"
    mask: UInt8Array  # [T] 1 where the policy sampled (or a teacher wrote) the token; "u1"
    logprobs: Float32Array  # [T] natural log of the sampler's probability; 0.0 where mask is 0; "<f4"
    versions: Int32Array  # [T] weights version that sampled the token; -1 where mask is 0 or supervised; "<i4"
    # Where turns have rewards: number of each turn that sampled here, in the trajectory, and its tokens; in that order.
    turns: list[tuple[Count, Count]] = []
    # Of a live turn with hints: its prompt with each hint, [P] ids; sampled tokens follow as in `tokens`.
    hinted: list[Int32Array] = []

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if not (len(self.mask) == len(self.logprobs) == len(self.versions) == length):
            raise ValueError(
                f"segment arrays differ in length: {length} tokens, {len(self.mask)} mask, "
                f"{len(self.logprobs)} logprobs, {len(self.versions)} versions"
            )
        check_range("mask", self.mask, most=1)
        check_range("token", self.tokens, least=0)
        check_range("version", self.versions, least=-1)
        self.logprobs = checked_logprobs(self.logprobs)


class VersionCount(msgspec.Struct):
    """The number of trainable tokens that one version sampled."""

    version: Version  # -1 for supervised tokens
    tokens: Count


def count_versions(segments: list[Segment]) -> list[VersionCount]:
    """Trainable tokens per version over all segments, by rising version."""
    counts: dict[int, int] = {}
    for segment in segments:
        trained = segment.versions[segment.mask != 0]
        if not len(trained):
            continue
        changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1  # a few: a version samples many tokens in a row
        for start, end in pairwise([0, *changes.tolist(), len(trained)]):
            version = int(trained[start])
            counts[version] = counts.get(version, 0) + end - start
    return [VersionCount(version, tokens) for version, tokens in sorted(counts.items())]


class Answer(msgspec.Struct, omit_defaults=True):
    """One recorded answer of a rollout's context: a `generate`, a tool, a clock, a random number, an outcome."""

    call: str  # "generate", "tool:NAME", "time", "random", "outcome", "snapshot"
    inputs: str  # xxh3 of the inputs: a replay must ask the same
    done: bool = True  # False: an unfinished generation with its tokens so far
    result: bytes = b""  # MessagePack of what a tool, clock or die answered, or of an outcome
    failed: str = ""  # the exception of a tool
    tokens: Int32Array = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # [T] sampled
    logprobs: Float32Array = msgspec.field(default_factory=lambda: np.empty(0, np.float32))  # [T]
    versions: Int32Array = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # [T], or [1] for all of them
    finish: str = ""  # "stop" or "length" once done
    start: Count = 0  # tokens published in the messages before; those here follow them
    hybrid: bool = False  # some tokens were sampled by newer weights than those that filled the cache before them
    routing: Experts | None = None  # where engines return experts


METRICS = 32  # that a rollout function, or a reward, may give for one trajectory
_OWN_METRICS = 8  # that the reward worker adds
ARTEFACTS = 16
ARTEFACT_BYTES = 65_536  # of all artefacts of a trajectory
NAME_CHARS = 64
TURNS = 512  # of a trajectory that may have rewards

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
Metrics: TypeAlias = Annotated[dict[Name, Real], Meta(max_length=2 * METRICS + _OWN_METRICS)]  # of all
TurnRewards: TypeAlias = Annotated[list[Real], Meta(max_length=TURNS)]


class Outcome(msgspec.Struct, omit_defaults=True):
    """Results that a rollout function returned: a reward, metrics, and artefacts."""

    reward: Real | None = None  # final if given
    metrics: Metrics = msgspec.field(default_factory=dict)
    artefacts: Annotated[dict[Name, bytes], Meta(max_length=ARTEFACTS)] = msgspec.field(default_factory=dict)
    turn_rewards: TurnRewards = msgspec.field(default_factory=list)  # of each `generate`, in the order of call paths


class _OfTrajectory(Message, kw_only=True):
    trajectory_id: Id
    attempt: Attempt = 0
    delivery: Count = 1


class _OfMember(_OfTrajectory, kw_only=True):
    prompt_id: Id
    member: Member
    group_size: GroupSize
    stage: Stage
    task: Id = ONLY_TASK


def member_fields(work: PromptIssued | _OfMember, delivery: int) -> dict[str, Any]:
    """The fields that a message about a member of a group has in common with the work that it follows from."""
    names = ("trajectory_id", "attempt", "prompt_id", "member", "group_size", "stage", "task")
    return {"delivery": delivery} | {name: getattr(work, name) for name in names}


class TrajectoryProgressedHeaders(Headers):
    """Headers that deciding and trimming need."""

    trajectory_id: Id
    attempt: Attempt
    delivery: Count
    offset: Count
    log: Id
    continued: Annotated[str, Meta(pattern=r"^([A-Za-z0-9_-]{1,128}:\d{1,19}(,|\Z))*\Z")] = msgspec.field(
        default="", name="before"
    )


class TrajectoryProgressed(_OfTrajectory):
    """From here on a worker stores the progress of this trajectory in its log, and no other worker's counts.

    The message is inside the trajectory's fence, once for each delivery that stores progress."""

    HEADERS: ClassVar[type[Headers]] = TrajectoryProgressedHeaders

    log: Id  # key of the worker's `progress.stored`
    offset: Count = 0  # tokens sampled before it
    before: list[Holding] = msgspec.field(default_factory=list)  # the progress that it continues, oldest first
    fruitless: Count = 0  # runs of its function that were begun since it last came further, this one among them

    @property
    def continued(self) -> str:
        """The progress that it continues, as its header has it."""
        return ",".join(f"{holding.log}:{holding.since}" for holding in self.before)


class ProgressEntry(_OfTrajectory):
    """The answers that a rollout function got since the entry before."""

    offset: Count  # tokens sampled so far, over all answers
    journal: dict[str, Answer]  # by call path: "0", "1", "1.0" (the first call of the second parallel branch) ...
    lineages: list[int] = msgspec.field(default_factory=list)  # lineages of weights that sampled tokens
    discarded: Count = 0  # tokens sampled so far that belong to no answer
    follows: Count = 0  # entries of this attempt that it continues; it does not count if one is missing


class ProgressStoredHeaders(Headers):
    """Headers that trimming needs; its subject names the log."""

    routing: str = ""


class ProgressStored(Message):
    """New progress of trajectories that one worker holds: one message for many of them, outside of their fences.

    An entry counts if the trajectory's newest `trajectory.progressed` names this log for the entry's delivery.
    """

    HEADERS: ClassVar[type[Headers]] = ProgressStoredHeaders

    log: Id  # one for each start of a worker process
    entries: list[ProgressEntry]
    routing: str = ""  # blob of the experts that these answers name, name:size:xxh3:chunks; "": they name none


class TrajectoryGeneratedHeaders(Headers):
    """Headers that folds need of a result, so that they never read its tokens."""

    trajectory_id: Id
    attempt: Attempt
    delivery: Count
    by_version: Annotated[str, Meta(pattern=r"^((-?\d{1,10}:\d{1,18})(,|\Z))*\Z")] = msgspec.field(name="versions")
    secret: SecretIds = ""
    routing_blob: str = msgspec.field(name=ROUTING, default="")
    spans: str = ""


class TrajectoryGenerated(_OfMember):
    """One finished execution of the policy on a prompt, not yet graded."""

    HEADERS: ClassVar[type[Headers]] = TrajectoryGeneratedHeaders

    rows: list[PromptRow]
    segments: list[Segment]
    completion: str  # text that the reward judges; by default what the policy sampled
    versions: list[VersionCount]
    truncated: bool = False  # the last generation ended at its length limit
    lineages: list[int] = msgspec.field(default_factory=list)  # lineages that sampled tokens; empty: supervised
    discarded: Count = 0  # sampled and discarded: mislabelled, or after a stop string
    verified: Count = 0  # sampled by engines that draft tokens, in this delivery
    passes: Count = 0  # model passes that verified drafted tokens
    outcome: Outcome | None = None  # where the rollout function gave one
    hybrid: bool = False  # of an answer of it; no version reproduces such log-probs (`weights.update = "in_place"`)
    secret: SecretIds = ""  # data keys under which this is sealed, of a turn of live traffic and those before it
    routing: Routing | None = None  # where engines return experts
    spans: str = ""  # seconds of this delivery by activity, such as `generate:1.25,tool:0.5`

    @property
    def by_version(self) -> str:
        """`12:40,13:9`: its trainable tokens by version, as its header has them."""
        return ",".join(f"{count.version}:{count.tokens}" for count in self.versions)

    @property
    def routing_blob(self) -> str:
        """The blob of the experts of its tokens; "" for none."""
        return self.routing.blob if self.routing is not None else ""


class Reference(msgspec.Struct):
    """The position of a trajectory's tokens, and their digest."""

    sequence: Sequence  # in the TRAJECTORIES stream
    digest: str  # xxh3_64 of the payload, hex; verified on fetch
    size: Count  # bytes


class GradeHeaders(Headers):
    """Headers that finding a grade needs."""

    trajectory_id: Id
    attempt: Attempt
    delivery: Count


class _OfResult(_OfMember, kw_only=True):
    """Properties of a generated trajectory, and the names of its tokens."""

    HEADERS: ClassVar[type[Headers]] = GradeHeaders

    payload: Reference
    versions: list[VersionCount]
    truncated: bool = False
    metrics: Metrics = msgspec.field(default_factory=dict)
    discarded: Count = 0  # as in its result
    verified: Count = 0  # as in its result
    passes: Count = 0  # as in its result
    hybrid: bool = False  # as in its result
    lengths: list[Count] = msgspec.field(default_factory=list)  # tokens of each segment, its prompt among them
    turn_rewards: TurnRewards = msgspec.field(default_factory=list)  # as in its outcome

    @property
    def result(self) -> int:
        """Sequence of the graded message."""
        return self.payload.sequence

    @property
    def tokens(self) -> int:
        """Trainable tokens."""
        return sum(count.tokens for count in self.versions)


class TrajectorySubmitted(_OfResult):
    """A generated trajectory whose reward needs its whole group, which the buffer gathers."""


class TrajectoryGraded(_OfResult, kw_only=True):
    """A reward for a generated trajectory."""

    reward: Real
    unshaped: Real | None = None  # the reward before the length penalty, if any

    @property
    def score(self) -> float:
        """The reward before it was shaped, by which a member passes: a right answer that is long is right."""
        return self.reward if self.unshaped is None else self.unshaped


class EndHeaders(Headers):
    """Headers that finding a failure, or the end of a trajectory, needs."""

    trajectory_id: Id
    attempt: Attempt
    reason: FailureReason | DropReason


class TrajectoryFailed(_OfMember):
    """A worker's claim that this trajectory cannot be finished. The buffer decides its end."""

    HEADERS: ClassVar[type[Headers]] = EndHeaders

    reason: FailureReason
    detail: str
    tokens: Count = 0  # sampled for it, as far as this worker knows


class TrajectoryDropped(Message):
    """An end: this trajectory is never trained on."""

    HEADERS: ClassVar[type[Headers]] = EndHeaders

    trajectory_id: Id
    attempt: Attempt
    reason: DropReason
    tokens: Count = 0  # discarded tokens, if known
    lag: Count = 0  # versions of lag, for the reason `lag`
    again: bool = False  # this attempt alone ends; the trajectory is to be issued again
    detail: str = ""
    task: Id = ONLY_TASK


def tokens_sampled(*results: TrajectoryGenerated | TrajectorySubmitted | TrajectoryGraded) -> int:
    """Tokens that engines sampled for all of them, also those that belong to no answer."""
    kept = sum(count.tokens for result in results for count in result.versions if count.version >= 0)
    return kept + sum(result.discarded for result in results)


_WORKERS = ("rollout", "reward", "groupreward")

TRAJECTORY_PROGRESSED = Topic(
    TrajectoryProgressed,
    TRAJECTORIES,
    ("rollout",),
    ("rollout", "supervisor"),
    key="trajectory_id",
    id=("trajectory_id", "attempt", "delivery"),
    fenced=True,
    pooled=True,
)
PROGRESS_STORED = Topic(ProgressStored, TRAJECTORIES, ("rollout",), ("rollout", "supervisor"), key="log")
TRAJECTORY_GENERATED = Topic(
    TrajectoryGenerated,
    TRAJECTORIES,
    ("rollout",),
    ("reward", "groupreward", "rollout", "learner", "recorder", "supervisor"),
    key="trajectory_id",
    id=("trajectory_id", "attempt", "delivery"),
    fenced=True,
    pooled=True,
)
TRAJECTORY_SUBMITTED = Topic(
    TrajectorySubmitted,
    GRADES,
    ("reward",),
    ("buffer",),
    key="trajectory_id",
    id=("trajectory_id", "attempt", "delivery", "result"),
)
TRAJECTORY_GRADED = Topic(
    TrajectoryGraded,
    GRADES,
    ("reward", "groupreward"),
    ("buffer", "recorder"),
    key="trajectory_id",
    id=("trajectory_id", "attempt", "delivery", "result"),
)
TRAJECTORY_FAILED = Topic(
    TrajectoryFailed,
    GRADES,
    _WORKERS,
    ("buffer", "recorder"),
    key="trajectory_id",
    id=("trajectory_id", "attempt", "delivery", "reason"),
)
TRAJECTORY_DROPPED = Topic(
    TrajectoryDropped, BATCHES, ("buffer",), ("prompter", "rollout", "recorder", "supervisor"), key="trajectory_id"
)
