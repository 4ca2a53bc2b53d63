"""A run's ledger: what its topics say of every trajectory, batch and version, and where one log contradicts itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import xxhash

from asyncrl.bus.log import Record
from asyncrl.bus.talk import BY, BlobMissing
from topics.actors import DEAD_LETTER, RUN_OPENED, DeadLetter, RunOpened
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchMember, BatchPacked, BatchTrained
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PROMPT_ISSUED
from topics.streams import STREAM_TRIMMED, StreamTrimmed
from topics.topic import DEAD, TRAJECTORIES, Topic
from topics.trajectories import (
    TRAJECTORY_DROPPED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryGraded,
    VersionCount,
    count_versions,
)
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished

Kind: TypeAlias = Literal[
    "issued twice",
    "left out",
    "never issued",
    "ended twice",
    "in two batches",
    "no end",
    "lost",
    "generated twice",
    "not graded",
    "wrong reference",
    "damaged payload",
    "packed twice",
    "trained twice",
    "step out of order",
    "wrong batch",
    "beyond lag bound",
    "more tokens than sampled",
    "unpublished version",
    "two digests",
]
End: TypeAlias = int | str  # the batch that holds it, or the reason it was dropped for


class Violation(NamedTuple):
    """Something a run's topics say that must not be."""

    kind: Kind
    id: str  # of the trajectory, prompt, batch or version
    found: str
    expected: str


class Key(NamedTuple):
    """An attempt at a trajectory."""

    trajectory_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.trajectory_id} (attempt {self.attempt})" if self.attempt else self.trajectory_id

    @property
    def prompt_id(self) -> str:
        """`p000042`."""
        return self.trajectory_id.rsplit("-", 1)[0]


class Stored(NamedTuple):
    """A result in the payload stream."""

    key: Key
    versions: str  # as its header has them: "3:120,4:17"
    digest: str  # "" where its body was not read
    size: int


class Ledger:
    """Takes in every message of a run. Order matters within a log only, never between logs."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.issued: dict[Key, int] = {}  # sequence of the issue
        self.sizes: dict[str, int] = {}  # members of each prompt's group
        self.first_prompt = 0
        self.signed: set[Key] = set()  # issues that say they are the prompter's
        self.ends: dict[Key, End] = {}
        self.closed: dict[str, End] = {}  # prompts whose group has ended
        self.grades: dict[Key, list[TrajectoryGraded]] = {}
        self.failed: set[Key] = set()
        self.stored: dict[int, Stored] = {}  # by sequence
        self.generated: dict[Key, int] = {}  # sequence of the result
        self.batches: dict[int, tuple[BatchPacked, int]] = {}  # by step, with their sequence
        self.trained: dict[int, BatchTrained] = {}  # by step, of the surviving line
        self.published: dict[tuple[int, int], str] = {}  # (line, version): digest
        self.checkpoints: list[CheckpointSaved] = []
        self._saved_ns: list[int] = []  # when each was said
        self._packed_ns: dict[int, int] = {}  # when each batch was said, by step
        self.buried: set[tuple[str, int]] = set()  # stream and sequence of dead letters
        self.max_lag: int | None = None  # as the run was opened; None where that was not heard
        self.first_step: int | None = None
        self.keep_checkpoints = 2
        self.trimmed = 0  # results below this sequence are said to be trimmed
        self.torn: dict[int, tuple[Key, str]] = {}  # results without all chunks of their blob, by sequence
        self.unreadable = 0
        self.mislabelled: dict[Key, Violation] = {}  # results whose tokens are not what their header says
        self.damaged: dict[tuple[str, int], Violation] = {}  # by stream and sequence
        self._steps: dict[tuple[int, int], int] = {}  # (line, step) said to be trained: sequence
        self._newest_packed: int | None = None
        self._newest_trained: BatchTrained | None = None
        self._handlers = {
            PROMPT_ISSUED.name: self._on_issued,
            TRAJECTORY_GENERATED.name: self._on_generated,
            TRAJECTORY_GRADED.name: self._on_graded,
            TRAJECTORY_FAILED.name: self._on_failed,
            TRAJECTORY_DROPPED.name: self._on_dropped,
            GROUP_DROPPED.name: self._on_group_dropped,
            BATCH_PACKED.name: self._on_packed,
            BATCH_TRAINED.name: self._on_trained,
            WEIGHTS_PUBLISHED.name: self._on_published,
            CHECKPOINT_SAVED.name: self._on_checkpoint,
            RUN_OPENED.name: self._on_opened,
            DEAD_LETTER.name: self._on_dead_letter,
            STREAM_TRIMMED.name: self._on_trimmed,
        }

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in.

        Issues and results are read by their headers alone (`message` is None); a result whose body is given as well
        is compared with what was graded.

        Raises:
            LookupError, ValueError: headers that are not what they must be.
        """
        handler: Any = self._handlers.get(topic.name)
        if handler is not None:
            handler(message, record)

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read."""
        self.unreadable += 1
        if isinstance(error, BlobMissing) and record.stream is TRAJECTORIES:
            self.torn[record.sequence] = (_key_of(record), str(error))
        elif isinstance(error, BlobMissing) and record.stream is not DEAD:
            where = f"message {record.sequence} of {record.stream.name}"
            found = Violation("damaged payload", where, str(error), "all chunks as they were stored")
            self.damaged[record.stream.name, record.sequence] = found

    def _say(self, kind: Kind, id: object, found: str, expected: str) -> None:
        self.violations.append(Violation(kind, str(id), found, expected))

    def _on_opened(self, message: RunOpened, _: Record) -> None:
        settings = message.settings
        if self.first_step is None:  # who goes on with a run begins it no second time
            self.first_prompt = _number(settings, "start", "prompt") or 0
            self.first_step = 1 + (_number(settings, "start", "step") or 0) - message.warmup_steps
        self.keep_checkpoints = _number(settings, "learner", "keep_checkpoints") or self.keep_checkpoints
        max_lag = _number(settings, "buffer", "max_lag")
        if max_lag is not None:
            self.max_lag = max(max_lag, self.max_lag or 0)

    def _on_issued(self, _: None, record: Record) -> None:
        key = _key_of(record)
        self.sizes[key.prompt_id] = int(record.headers["group-size"])
        if record.headers.get(BY, "").startswith("prompter-"):
            self.signed.add(key)
        before = self.issued.setdefault(key, record.sequence)
        if before != record.sequence:
            self._say("issued twice", key, f"messages {before} and {record.sequence}", "one issue an attempt")

    def _on_generated(self, message: TrajectoryGenerated | None, record: Record) -> None:
        key, versions = _key_of(record), record.headers["versions"]
        digest = xxhash.xxh3_64_hexdigest(record.data) if message is not None else ""
        self.stored[record.sequence] = Stored(key, versions, digest, len(record.data))
        before = self.generated.setdefault(key, record.sequence)
        if before != record.sequence:
            self._say("generated twice", key, f"messages {before} and {record.sequence}", "one result an attempt")
        if message is not None and (counted := versions_text(count_versions(message.segments))) != versions:
            found, expected = f"tokens of versions {counted}", f"{versions}, as its header says"
            self.mislabelled[key] = Violation("damaged payload", str(key), found, expected)

    def _on_graded(self, message: TrajectoryGraded, _: Record) -> None:
        self.grades.setdefault(Key(message.trajectory_id, message.attempt), []).append(message)

    def _on_failed(self, message: TrajectoryFailed, _: Record) -> None:
        self.failed.add(Key(message.trajectory_id, message.attempt))

    def _on_dropped(self, message: TrajectoryDropped, _: Record) -> None:
        self._end(Key(message.trajectory_id, message.attempt), message.reason)

    def _on_group_dropped(self, message: GroupDropped, _: Record) -> None:
        name = message.prompt_id
        if name in self.closed:
            found = f"{end_text(self.closed[name])}, then {end_text(message.reason)} as a group"
            self._say("ended twice", name, found, "one end")
        else:
            self.closed[name] = message.reason

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        step, newest = message.step, self._newest_packed
        if step in self.batches:
            found = f"messages {self.batches[step][1]} and {record.sequence}"
            self._say("packed twice", f"batch {step}", found, "one batch a step")
            return
        if newest is not None and step != newest + 1:
            self._say("step out of order", f"batch {step}", f"packed after batch {newest}", f"batch {newest + 1}")
        self._newest_packed = step
        self._packed_ns[step] = record.time_ns
        self.batches[step] = (message, record.sequence)
        for group in message.groups:
            new = [self._end(key_of_member(member), step) for member in group.members]
            if group.prompt_id not in self.closed:
                self.closed[group.prompt_id] = step
            elif all(new):  # else it is said already
                before = self.closed[group.prompt_id]
                self._say_ended_again(group.prompt_id, before, step)

    def _end(self, key: Key, end: End) -> bool:
        """Note an end; False where there was one before."""
        if key in self.ends:
            self._say_ended_again(key, self.ends[key], end)
            return False
        self.ends[key] = end
        return True

    def _say_ended_again(self, id: object, before: End, end: End) -> None:
        kind: Kind = "in two batches" if isinstance(before, int) and isinstance(end, int) else "ended twice"
        self._say(kind, id, f"{end_text(before)}, then {end_text(end)}", "one end")

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        step, line, last = message.step, message.line, self._newest_trained
        before = self._steps.setdefault((line, step), record.sequence)
        if before != record.sequence:
            found = f"messages {before} and {record.sequence} on line {line}"
            self._say("trained twice", f"batch {step}", found, "once on a line")
            return
        if last is not None:
            again = line > last.line and step <= last.step
            if not again and (step != last.step + 1 or line < last.line):
                found = f"trained on line {line} after batch {last.step} on line {last.line}"
                self._say("step out of order", f"batch {step}", found, f"batch {last.step + 1}")
            if again:  # what the older line trained after this step is in no weights any more
                self.trained = {number: trained for number, trained in self.trained.items() if number < step}
        self.trained[step] = self._newest_trained = message

    def _on_published(self, message: WeightsPublished, _: Record) -> None:
        before = self.published.setdefault((message.line, message.version), message.digest)
        if before != message.digest:
            name = f"version {message.version} of line {message.line}"
            self._say("two digests", name, f"{before} and {message.digest}", "one digest a version")

    def _on_checkpoint(self, message: CheckpointSaved, record: Record) -> None:
        self.checkpoints.append(message)
        self._saved_ns.append(record.time_ns)

    @property
    def kept_step(self) -> int | None:
        """Tokens of the batches up to this step may be gone; None where all must be there.

        All kept checkpoints contain them, or one does that contained every batch there was for a while: in a full
        stream that one alone counts, for no other would come.
        """
        kept = self.checkpoints[-self.keep_checkpoints :]
        steps = [min(saved.step for saved in kept)] if len(kept) > 1 else []
        for saved, at in zip(self.checkpoints, self._saved_ns, strict=True):
            following = self._packed_ns.get(saved.step + 1)
            if following is None or following > at:
                steps.append(saved.step)
        return max(steps, default=None)

    def _on_trimmed(self, message: StreamTrimmed, _: Record) -> None:
        self.trimmed = max(self.trimmed, message.below)

    def _on_dead_letter(self, message: DeadLetter, _: Record) -> None:
        self.buried.add((message.stream, message.sequence))


def key_of_member(member: BatchMember) -> Key:
    """The attempt that a batch holds."""
    return Key(member.trajectory_id, member.attempt)


def versions_text(counts: Sequence[VersionCount]) -> str:
    """Tokens per version as the header of a result has them: `3:120,4:17`."""
    return ",".join(f"{count.version}:{count.tokens}" for count in counts)


def end_text(end: End) -> str:
    """`batch 3`, or `dropped (lag)`."""
    return f"batch {end}" if isinstance(end, int) else f"dropped ({end})"


def _key_of(record: Record) -> Key:
    return Key(record.headers["trajectory"], int(record.headers["attempt"]))


def _number(settings: dict[str, Any], table: str, name: str) -> int | None:
    """A whole number among the settings that a run was opened with."""
    found = settings.get(table)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, int) else None
