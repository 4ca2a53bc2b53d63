"""Tokens, weights and checkpoints that are still needed: a pure function of messages, in any order between logs.

Unread messages count as needed: an end or a checkpoint that is read late leaves a message for the next time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.runtime.checkpoints import CheckpointFold, CheckpointState
from actors.supervisor.channel import Channel
from actors.supervisor.stored_version import StoredVersion
from asyncrl.bus.blobs import Blob, blobs_of
from asyncrl.bus.log import Record
from asyncrl.config.pools import keep_first
from asyncrl.config.settings import Config
from topics.batches import BatchPacked
from topics.engines import EngineGone, EngineReady, EngineUpdating, version_of
from topics.evals import EvalScored
from topics.groups import GroupDropped
from topics.ids import PromptIdSet, member_of, prompt_of, trajectory_name
from topics.streams import AdmissionPaused, AdmissionResumed
from topics.trajectories import (
    ProgressStoredHeaders,
    TrajectoryDropped,
    TrajectoryGeneratedHeaders,
    TrajectoryProgressedHeaders,
)
from topics.weights import WeightsPublished


class Version(NamedTuple):
    """A version in the weight store."""

    lineage: int
    version: int
    name: str  # of its directory, or in the stream
    base: tuple[int, int] | None = None  # lineage and version that it is a difference to
    digest: str = ""
    sequence: int = 0  # of its weights.published


class Needless(NamedTuple):
    """Messages that nothing needs any more."""

    below: int  # every message below this sequence
    logs: dict[str, int]  # progress logs whose every message below this sequence is of no use
    ended: dict[str, int]  # trajectories whose every message below this sequence is of no use
    blobs: list[Blob]  # that these messages name


class Kept(NamedTuple):
    """Directories that stay, of one kind."""

    names: frozenset[str]
    newest: tuple[int, int]  # lineage and number of the newest one published


class _Named(NamedTuple):
    blobs: list[Blob]
    owner: str  # a trajectory, or a progress log

    def goes(self, at: int, gone: Needless) -> bool:
        """Return whether the message that names it, of this sequence, is gone."""
        return at < max(gone.below, gone.logs.get(self.owner, 0), gone.ended.get(self.owner, 0))


class _Stretch(NamedTuple):
    """The positions of a progress log's messages."""

    first: int  # sequence of the oldest that was not purged
    last: int


class Batch(msgspec.Struct):
    """The references of a batch."""

    lowest: int  # least sequence
    members: dict[str, list[int]]  # by prompt

    def names(self) -> Iterator[str]:
        """Its trajectories."""
        return (trajectory_name(prompt_id, member) for prompt_id, members in self.members.items() for member in members)


class RoomState(CheckpointState, msgspec.Struct):
    """All that was folded of ledger logs, as plain data: a snapshot holds it."""

    closed: PromptIdSet = msgspec.field(default_factory=PromptIdSet)  # prompts whose group has ended
    further: dict[str, set[int]] = {}  # members that continue after a batch took others, by prompt
    batches: dict[int, Batch] = {}  # after the oldest kept checkpoint, by step
    published: list[Version] = []  # in the order of the log, without those that need not stay
    engines: dict[str, set[tuple[int, int]]] = {}  # versions that an engine has, or is taking
    paused: bool = False
    channel: Channel = msgspec.field(default_factory=Channel)


class TrimmerFold(CheckpointFold):
    """Open groups, batches after the oldest kept checkpoint, contents of the stream, and which weights engines have.

    The contents of the payload stream are not part of the state: they are read from there, and are as large as the
    stream.
    """

    state: RoomState

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._keep_versions = config.learner.keep_versions
        self._always = {(0, config.start.step)} if keep_first(config) else set()  # that of judges and opponents
        self._exact = bool(config.eval.engines)  # no other version than the one asked for may answer an evaluation
        self.state = RoomState(self._origin - 1)
        self._open: dict[str, set[str]] = {}  # trajectories of open groups of which anything is stored
        self._newest: dict[str, int] = {}  # sequence of the newest message inside a trajectory's fence
        # by trajectory and progress log: all needed entries are at or above this sequence
        self._since: dict[str, dict[str, int]] = {}
        self._logs: dict[str, _Stretch] = {}
        self._blobs: dict[int, _Named] = {}  # by the sequence of the message that names them

    def _on_dropped(self, dropped: GroupDropped, _record: Record) -> None:
        self._close(dropped.prompt_id)

    def _on_member_dropped(self, dropped: TrajectoryDropped, _record: Record) -> None:
        prompt_id = prompt_of(dropped.trajectory_id)
        if (further := self.state.further.get(prompt_id)) is not None:
            self._continue(prompt_id, further - {member_of(dropped.trajectory_id)})

    def _on_scored(self, scored: EvalScored, _record: Record) -> None:
        self._close(scored.eval_id)

    def _forget(self) -> None:
        kept = self.kept_step
        self.state.batches = {step: batch for step, batch in self.state.batches.items() if step > kept}

    def _on_published(self, published: WeightsPublished, record: Record) -> None:
        base = version_of(published.base) if published.base else None
        name, digest = Path(published.location).name, published.digest
        version = Version(published.lineage, published.version, name, base, digest, record.sequence)
        self.state.published.append(version)

    def _on_updating(self, engine: EngineUpdating, _record: Record) -> None:
        self.state.engines.setdefault(engine.engine_id, set()).add((engine.lineage, engine.version))

    def _on_ready(self, engine: EngineReady, _record: Record) -> None:
        self.state.engines[engine.engine_id] = {(engine.lineage, engine.version)}

    def _on_gone(self, engine: EngineGone, _record: Record) -> None:
        self.state.engines.pop(engine.engine_id, None)

    def _on_paused(self, _paused: AdmissionPaused, _record: Record) -> None:
        self.state.paused = True

    def _on_resumed(self, _resumed: AdmissionResumed, _record: Record) -> None:
        self.state.paused = False

    def floor(self, end: int, contained: int | None = None) -> int:
        """The least sequence of TRAJECTORIES that is still needed.

        Args:
            end: everything below it has been folded, and the reward queue has nothing below it to hand out (a purge
                silently takes unacknowledged messages).
            contained: batches up to this step are needed no more; unless given, those in the oldest kept checkpoint.
        """
        lowest = [batch.lowest for batch in self._needed(contained)]
        # A trajectory that is sampled, graded or waits for a batch needs the newest message inside its fence: the
        # message names its progress, is its result, or precedes the next attempt.
        open_now = (min((self._newest[name], *self._since[name].values())) for name in self.open)
        return min((end, *lowest, *open_now))

    def needless(self, end: int, contained: int | None = None, *, pressed: bool) -> Needless:
        """Return the purge plan.

        Args:
            end, contained: as for `floor`.
            pressed: whether room is short: then needless messages between needed ones are purged, too.
        """
        gone = Needless(self.floor(end, contained), {}, {}, [])
        if pressed:
            needed = set().union(*self._open.values(), *(batch.names() for batch in self._needed(contained)))
            above = {name: newest for name, newest in self._newest.items() if newest >= gone.below}
            gone.logs.update(self._needless_logs(end))
            gone.ended.update((name, at + 1) for name, at in above.items() if at < end and name not in needed)
        gone.blobs.extend(blob for at, named in self._blobs.items() if named.goes(at, gone) for blob in named.blobs)
        return gone

    def _needless_logs(self, end: int) -> Iterator[tuple[str, int]]:
        """Progress logs with messages that no open trajectory continues, and the sequence that these lie below."""
        needed: dict[str, int] = {}
        for name in self.open:
            for log, since in self._since[name].items():
                needed[log] = min(since, needed.get(log, since))
        for log, stretch in self._logs.items():
            below = min(needed.get(log, end), stretch.last + 1)
            if stretch.first < below <= end:
                yield log, below

    def _needed(self, contained: int | None) -> list[Batch]:
        """Batches that a learner may have to train again, or for the first time."""
        done = self.kept_step if contained is None else contained
        return [batch for step, batch in self.state.batches.items() if step > done]

    @property
    def open(self) -> list[str]:
        """Trajectories of open groups of which anything is stored."""
        return [name for names in self._open.values() for name in names]

    def disown(self, names: Collection[str]) -> None:
        """Drop messages of trajectories that were never issued."""
        for name in names:
            self._open[prompt_of(name)].discard(name)

    def forget(self, gone: Needless) -> None:
        """Forget purged messages."""
        for name in [name for name, at in self._newest.items() if at < max(gone.below, gone.ended.get(name, 0))]:
            del self._newest[name], self._since[name]
        for log, stretch in list(self._logs.items()):
            first = max(stretch.first, gone.below, gone.logs.get(log, 0))
            self._logs[log] = stretch._replace(first=first)
            if first > stretch.last:
                del self._logs[log]
        self._blobs = {at: named for at, named in self._blobs.items() if not named.goes(at, gone)}

    @property
    def stored(self) -> list[StoredVersion]:
        """Versions that are in the store, in the order in which they were published."""
        return [StoredVersion(*version[:2], version.digest, version.sequence) for version in self.state.published]

    def names_of(self, lineage: int, version: int) -> list[str]:
        """Return the names of the files that a version is made of: its own, and those it is a difference to."""
        newest = {one[:2]: one for one in self.state.published}
        names, at = [], newest.get((lineage, version))
        while at is not None:
            names.append(at.name)
            at = newest.get(at.base) if at.base is not None else None
        return names

    def versions(self) -> Kept | None:
        """Weights that stay: the newest, and those that an engine has or is taking.

        Open work asks for its `min_version` or a newer one: the newest is one of these. The others are forgotten.
        """
        published = self.state.published
        if not published:
            return None
        needed = {version for versions in self.state.engines.values() for version in versions} | self._always
        old, new = published[: -self._keep_versions], published[-self._keep_versions :]
        needed |= {version.base for version in new if version.base is not None}
        kept = []
        for version in reversed(old):  # a base comes before its differences
            if version[:2] in needed or self.state.channel.keeps(*version[:2], self._keep_versions, exact=self._exact):
                kept.append(version)
                needed |= {version.base} if version.base is not None else set()
        self.state.published = [*reversed(kept), *new]
        return Kept(frozenset(version.name for version in self.state.published), new[-1][:2])

    def checkpoints(self) -> Kept | None:
        """Checkpoints that stay."""
        kept = self.state.checkpoints
        if not kept:
            return None
        newest = kept[-1]
        return Kept(frozenset(Path(saved.path).name for saved in kept), (newest.lineage, newest.step))

    def _on_progress(self, _headers: ProgressStoredHeaders, record: Record) -> None:
        log = record.key
        self._logs[log] = _Stretch(self._logs[log].first if log in self._logs else record.sequence, record.sequence)
        self._note_blob(record, log)

    def _on_progressed(self, headers: TrajectoryProgressedHeaders, record: Record) -> None:
        self.note(record, [(headers.log, record.sequence), *_continued(headers)])

    def _on_stored(self, _headers: TrajectoryGeneratedHeaders, record: Record) -> None:
        self.note(record)

    def note(self, record: Record, continued: Iterable[tuple[str, int]] = ()) -> None:
        """Note a message inside the fence of a trajectory, which may be unreadable.

        Args:
            continued: the progress logs that it names, and from where on it needs them.

        Raises:
            ValueError: its subject or blob has no name of ours.
        """
        name = record.key
        self._newest[name] = record.sequence
        since = self._since[name] = {}
        for log, at in continued:
            since[log] = min(at, since.get(log, at))  # a worker that held it twice is named twice
        self._note_blob(record, name)
        prompt_id = prompt_of(name)
        further = self.state.further.get(prompt_id)
        if prompt_id not in self.state.closed and (further is None or member_of(name) in further):
            self._open.setdefault(prompt_id, set()).add(name)

    def _note_blob(self, record: Record, owner: str) -> None:
        if blobs := list(blobs_of(record)):
            self._blobs[record.sequence] = _Named(blobs, owner)

    def _on_packed(self, packed: BatchPacked, _record: Record) -> None:
        if packed.step > self.kept_step and any(group.members for group in packed.groups):
            lowest = min(member.payload.sequence for group in packed.groups for member in group.members)
            members = {
                group.prompt_id: [member_of(member.trajectory_id) for member in group.members]
                for group in packed.groups
            }
            self.state.batches[packed.step] = Batch(lowest, members)
        for group in packed.groups:
            self._continue(group.prompt_id, set(group.further))

    def _continue(self, prompt_id: str, further: set[int]) -> None:
        """Note the members of a group that are open still; it is closed without them."""
        if not further:
            self._close(prompt_id)
            return
        self.state.further[prompt_id] = further
        names = {trajectory_name(prompt_id, member) for member in further}
        self._open[prompt_id] = self._open.get(prompt_id, set()) & names

    def _close(self, prompt_id: str) -> None:
        self.state.closed.add(prompt_id)
        self.state.further.pop(prompt_id, None)
        self._open.pop(prompt_id, None)


def _continued(headers: TrajectoryProgressedHeaders) -> Iterator[tuple[str, int]]:
    for named in filter(None, headers.continued.split(",")):
        log, since = named.rsplit(":", 1)
        yield log, int(since)
