"""A run's ledger: what its topics hold of every trajectory, batch and version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.fold import Fold
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record
from asyncrl.bus.publish import unpack
from asyncrl.state.audit.channel import Channel
from asyncrl.state.audit.groups import WHOLE, Groups
from asyncrl.state.audit.live import Live
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.stages import Stages
from asyncrl.state.audit.training import Batch, Training
from asyncrl.state.audit.violations import Violation, Violations, Writers, place_of
from topics.actors import DeadLetter
from topics.batches import BatchPacked
from topics.streams import StreamTrimming
from topics.topic import BATCHES, DEAD, PROMPTS, TRAJECTORIES, TURNS, Stream, Topic
from topics.wire import SEALED, Headers, Message


class Ledger(Fold):
    """Takes in every message of a run: how it was opened and the learner's log first, then the others.

    The order between those decides how much is held at once, and nothing else: little when the oldest comes first.
    """

    def __init__(self, *, first_result: int = 0) -> None:
        self.violations = Violations()
        self.opening = Opening(self.violations)
        self.training = Training(self.opening, self.violations)
        self.writers = Writers(self.violations)
        self.groups = Groups(self.training, self.writers, self.violations, first_result=first_result)
        self.stages = Stages(self.opening, self.groups, self.violations)
        self.batches = self.groups.batches
        self.channel = Channel()
        self.live = Live(self.opening, self.violations)
        self.packed_ns: list[int] = []  # server's clock at each batch of RL
        self.letters: dict[tuple[str, int], DeadLetter] = {}  # without bodies, by stream and sequence
        self.legible: set[tuple[str, int]] = set()  # of those, messages that can be read after all
        self.later_versions: set[int] = set()  # published after the learner's log was read
        self.unreadable = 0
        self.purged = 0  # messages that are sealed under a data key that was erased
        self.sealed = 0  # and under one that is not there, or not for this reader
        self.first_result = first_result  # as for `Groups`
        self.trimmed = 0  # results below this sequence may be gone, as the log of the supervisor has it
        self.ended: dict[str, int] = {}  # and of these trajectories below theirs, since the audit began
        self.buffer_ns = 0  # server's clock at the newest record of the batch log
        self.on_message: Callable[[Message], None] | None = None  # takes each message of the batch log
        self._damaged: dict[tuple[str, int], Violation] = {}  # by stream and sequence

    def apply(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        """Fold one message in.

        Issues and results may be read by their headers alone; where a body is given as well it is compared with what
        the headers and others have of it.

        Raises:
            LookupError, ValueError: invalid values.
        """
        self.writers.check(topic, message, record)
        if record.stream is BATCHES:
            self.buffer_ns = record.time_ns
        for part in (self.opening, self.training, self.stages, self.groups, self.channel, self.live):
            part.apply(topic, message, record)
        super().apply(topic, message, record)
        if record.stream is BATCHES and isinstance(message, Message) and self.on_message is not None:
            self.on_message(message)

    def refuse(self, record: Record, error: Exception) -> None:
        if isinstance(error, SecretGone):
            self._add_sealed(record)
            return
        self.unreadable += 1
        lost_chunks = isinstance(error, BlobMissing)
        if lost_chunks and record.stream is TRAJECTORIES:
            with suppress(LookupError, ValueError):  # headers that no result has
                self.groups.on_torn(record, error)
        elif record.stream is TRAJECTORIES:
            self.groups.unreadable[record.sequence] = str(error)
        elif lost_chunks and record.stream is not DEAD:
            found = Violation("damaged payload", place_of(record), str(error), WHOLE)
            if record.stream.keeper:
                self.violations.append(found)
            else:
                self._damaged[record.stream.name, record.sequence] = found
        elif record.stream.keeper:
            expected = f"a message that the {record.stream.keeper} stored"
            self.violations.add("unreadable record", place_of(record), str(error), expected)
        self._apply_headers(record, PROMPTS, TURNS)

    def _add_sealed(self, record: Record) -> None:
        """A message without a content: its headers are all that is compared."""
        if not self.opening.is_purged(record.headers[SEALED]):
            self.sealed += 1
        else:
            self.purged += 1
        self._apply_headers(record, TRAJECTORIES, TURNS)

    def _apply_headers(self, record: Record, *streams: Stream) -> None:
        """Fold in the headers of a record of these logs: most comparisons need no body."""
        if record.stream in streams:
            part = self.live if record.stream is TURNS else self.groups
            with suppress(LookupError, ValueError):
                part.apply(*unpack(record, None), record)

    def finish(self) -> None:
        """Everything was read: compare the rest."""
        self.groups.finish()
        self.violations += [found for place, found in self._damaged.items() if place not in self.letters]

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

    def _on_trimming(self, message: StreamTrimming, _: Record) -> None:
        self.trimmed = max(self.trimmed, message.below)

    def _on_dead_letter(self, message: DeadLetter, _: Record) -> None:
        self.letters[message.stream, message.sequence] = msgspec.structs.replace(message, headers={}, body=b"")
