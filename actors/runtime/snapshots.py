"""Snapshots of keepers: a fold's state on its own log, with how far each log is in it. They only speed up a start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import xxhash

from actors.runtime.actor import Context
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.log import Record, last_sequence, read_newest
from asyncrl.bus.publish import read
from topics.actors import KeeperSnapshot
from topics.topic import Stream
from topics.wire import WireError, decode, encode

_COUNTED_BYTES = 512


@runtime_checkable
class Restorable(Protocol):
    """A fold that is nothing but its state."""

    state: msgspec.Struct  # plain data; a field whose meaning changes gets another name


class Snapshots:
    """Takes and restores the snapshots of one keeper's fold; where its log has no topic for them, there are none."""

    def __init__(self, context: Context, own: Stream, fold: object) -> None:
        self.topic = context.bus.tables.by_name.get(f"{context.role}.snapshot")
        self.subject = self.topic.subject(context.bus.run) if self.topic is not None else ""
        self.since = 0  # records folded since the newest snapshot, large ones more than once
        self._context = context
        self._own = own
        self._fold = fold

    def count(self, record: Record) -> None:
        """A record was folded. What a start costs grows with records and bytes."""
        self.since = 0 if record.subject == self.subject else self.since + 1 + len(record.data) // _COUNTED_BYTES

    @property
    def due(self) -> bool:
        """Return whether so much was folded that the next start should not fold it again."""
        return self.topic is not None and self.since >= self._context.config.supervision.snapshot_every

    def take(self, positions: Mapping[str, int]) -> KeeperSnapshot:
        """Take a snapshot of the fold, between two records.

        Args:
            positions: sequence of the newest record folded, by the name of the stream.
        """
        assert isinstance(self._fold, Restorable)
        self.since = 0
        return KeeperSnapshot(format_of(type(self._fold.state)), dict(positions), encode(self._fold.state))

    async def restore(self, streams: Sequence[Stream]) -> Mapping[str, int]:
        """Put the newest snapshot into the fold, if it can be trusted.

        Returns:
            Sequence up to which each stream is in the fold; empty where everything is to be folded.
        """
        if not self.subject or not isinstance(self._fold, Restorable):
            return {}
        bus, log = self._context.bus, self._context.log
        record = await read_newest(bus, self._own, self.subject)
        if record is None:
            return {}
        try:
            snapshot = await read(bus, KeeperSnapshot, record)
            if snapshot.format != format_of(type(self._fold.state)):
                raise WireError("another version of this program took it")
            ends = {stream.name: await last_sequence(bus, stream) for stream in streams} | {
                self._own.name: record.sequence - 1
            }
            check_positions(snapshot.positions, ends)
            self._fold.state = decode(type(self._fold.state), snapshot.state)
        except (WireError, BlobMissing) as error:
            log.warning("snapshot unusable", sequence=record.sequence, reason=str(error))
            return {}
        log.info("snapshot restored", sequence=record.sequence, **snapshot.positions)
        return snapshot.positions


def check_positions(positions: Mapping[str, int], ends: Mapping[str, int]) -> None:
    """Compare how far some logs were folded with their ends, by name.

    Raises:
        WireError: these are no positions in these logs.
    """
    if positions.keys() != ends.keys():
        raise WireError(f"it folds {sorted(positions)}, not {sorted(ends)}")
    for name, position in positions.items():
        if not 0 <= position <= ends[name]:
            raise WireError(f"it has folded {name} up to {position}, which ends at {ends[name]}")


def format_of(kind: type[msgspec.Struct]) -> str:
    """Describe names and types of the fields: a snapshot of other fields is no state of this fold."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(msgspec.json.schema(kind)))
