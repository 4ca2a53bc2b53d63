"""A run's ledger: what its topics hold of every trajectory, batch and version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from asyncrl.bus.log import Record
from asyncrl.bus.publish import BlobMissing, unpack_headers
from asyncrl.state.audit.batch import Batch
from asyncrl.state.audit.groups import WHOLE, Groups
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.training import Training
from asyncrl.state.audit.violations import Violation, Violations
from asyncrl.state.audit.writers import Writers, place_of
from topics.actors import DEAD_LETTER, REISSUE_REQUESTED, RUN_OPENED, SKIP_REQUESTED, DeadLetter
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked
from topics.engines import ENGINE_READY
from topics.evals import EVAL_REQUESTED, EVAL_SCORED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED
from topics.streams import STREAM_TRIMMED, StreamTrimmed
from topics.topic import BATCHES, DEAD, PROMPTS, STREAMS, TRAJECTORIES, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.weights import CHECKPOINT_LOST, CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED

_KEPT = {stream.name for stream in STREAMS if stream.keeper}


class LetterNote(NamedTuple):
    """The part of a dead letter that the audit keeps."""

    reason: str
    poison: bool  # its message can be read, and ended worker after worker


class Ledger:
    """Takes in every message of a run: how it was opened and the learner's log first, then the others.

    The order between those decides how much is held at once, and nothing else: little when the oldest comes first.
    """

    def __init__(self, *, first_result: int = 0, last_result: int = 2**63) -> None:
        """
        Args:
            first_result, last_result: as for `Groups`.
        """
        self.violations = Violations()
        self.opening = Opening(self.violations)
        self.training = Training(self.opening, self.violations)
        self.writers = Writers(self.violations)
        self.groups = Groups(
            self.training, self.writers, self.violations, first_result=first_result, last_result=last_result
        )
        self.batches = self.groups.batches
        self.packed_ns: list[int] = []  # server's clock at each batch of RL
        self.letters: dict[tuple[str, int], LetterNote] = {}  # by stream and sequence
        self.later_versions: set[int] = set()  # published after the learner's log was read
        self.unreadable = 0
        self.first_result = first_result
        self.trimmed = 0  # results below this sequence are gone, as the log of the supervisor has it
        self.buffer_ns = 0  # server's clock at the newest record of the batch log
        self._damaged: dict[tuple[str, int], Violation] = {}  # by stream and sequence
        groups, training = self.groups, self.training
        self._handlers: dict[str, Callable[..., None]] = {
            PROMPT_ISSUED.name: groups.on_issued,
            TRAJECTORY_GENERATED.name: groups.on_generated,
            TRAJECTORY_GRADED.name: groups.on_claim,
            TRAJECTORY_FAILED.name: groups.on_claim,
            TRAJECTORY_DROPPED.name: groups.on_dropped,
            GROUP_DROPPED.name: groups.on_group_dropped,
            BATCH_PACKED.name: self._on_packed,
            BATCH_TRAINED.name: training.on_trained,
            WEIGHTS_PUBLISHED.name: training.on_published,
            CHECKPOINT_SAVED.name: training.on_checkpoint,
            CHECKPOINT_LOST.name: training.on_lost,
            RUN_OPENED.name: self.opening.on_opened,
            REISSUE_REQUESTED.name: self.opening.on_reissue,
            SKIP_REQUESTED.name: training.on_skip_requested,
            TRAINING_FINISHED.name: training.on_finished,
            ENGINE_READY.name: training.on_ready,
            EVAL_REQUESTED.name: training.on_eval_requested,
            EVAL_SCORED.name: groups.on_scored,
            DEAD_LETTER.name: self._on_dead_letter,
            STREAM_TRIMMED.name: self._on_trimmed,
        }

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in.

        Issues and results may be read by their headers alone (`message` is None); where a body is given as well it is
        compared with what the headers and others have of it.

        Raises:
            LookupError, ValueError: headers that are not what they must be.
        """
        self.writers.check(topic, message, record)
        if record.stream is BATCHES:
            self.buffer_ns = record.time_ns
        handler = self._handlers.get(topic.name)
        if handler is not None:
            handler(message, record)

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read."""
        self.unreadable += 1
        lost_chunks = isinstance(error, BlobMissing)
        if lost_chunks and record.stream is TRAJECTORIES:
            self.groups.on_torn(record, error)
        elif lost_chunks and record.stream is not DEAD:
            found = Violation("damaged payload", place_of(record), str(error), WHOLE)
            self._damaged[record.stream.name, record.sequence] = found
        elif record.stream.keeper:
            expected = f"a message that the {record.stream.keeper} stored"
            self.violations.add("unreadable record", place_of(record), str(error), expected)
        if record.stream is PROMPTS:  # the headers are enough for all that count on it
            with suppress(LookupError, ValueError):
                if unpack_headers(record) is PROMPT_ISSUED:
                    self.groups.on_issued(None, record)

    def finish(self) -> None:
        """All was read: compare what is not folded away."""
        self.groups.finish()
        for (stream, sequence), found in self._damaged.items():
            if stream in _KEPT or (stream, sequence) not in self.letters:  # else it is named there
                self.violations.append(found)

    def excused(self) -> list[tuple[str, int]]:
        """Stream and sequence of the work of open trajectories that has a dead letter."""
        places = [(work.stream, work.sequence) for group in self.groups.kept.values() for work in group.open()]
        return [place for place in places if place in self.letters]

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        step, newest = message.step, self.groups.newest_packed
        if step in self.batches:
            found = f"messages {self.batches[step].sequence} and {record.sequence}"
            self.violations.add("packed twice", f"batch {step}", found, "one batch a step")
            return
        if newest is not None and step != newest + 1:
            found = f"packed after batch {newest}"
            self.violations.add("step out of order", f"batch {step}", found, f"batch {newest + 1}")
        if message.stage == "rl":
            self.packed_ns.append(record.time_ns)
        self.groups.on_packed(message, Batch(message, record))

    def _on_trimmed(self, message: StreamTrimmed, _: Record) -> None:
        self.trimmed = max(self.trimmed, message.below)

    def _on_dead_letter(self, message: DeadLetter, _: Record) -> None:
        self.letters[message.stream, message.sequence] = LetterNote(message.reason, message.poison)
