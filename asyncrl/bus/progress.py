"""Progress of trajectories, with the experts of tokens in a separate blob: readers of the log fetch only the rows of
trajectories that they resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from asyncrl.bus.blobs import fetch_blob, in_chunks, store_blob
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.publish import publish
from topics.payload_refs import ROUTING, Experts
from topics.topic import BLOBS
from topics.trajectories import PROGRESS_STORED, Answer, ProgressEntry, ProgressStored
from topics.wire import WireError


async def publish_progress(bus: Bus, log: str, entries: list[ProgressEntry]) -> int:
    """Store new progress of some trajectories, the experts of tokens first, and return the sequence of the message."""
    rows = _Rows()
    message = ProgressStored(log, [rows.taken_from(entry) for entry in entries])
    if rows.size:
        message.routing = await store_blob(bus, PROGRESS_STORED, in_chunks(bus, b"".join(rows.parts)))
    return await publish(bus, message)


async def with_rows(bus: Bus, record: Record, entry: ProgressEntry) -> ProgressEntry:
    """Return an entry with the experts that its answers name.

    Args:
        record: of the message, by its headers.

    Raises:
        BlobMissing: the blob is gone or altered.
        WireError: the message contradicts itself.
    """
    if not any(experts.stop for experts in _experts(entry.journal.values())):
        return entry
    content = await fetch_blob(bus, BLOBS, record.headers.get(ROUTING, ""))

    def read(experts: Experts) -> Experts:
        found = content[experts.start : experts.stop]
        if len(found) != experts.stop - experts.start or len(found) % experts.width:
            where = f"bytes {experts.start} to {experts.stop} of a blob of {len(content)}"
            raise WireError(f"experts of {entry.trajectory_id}: {where}, expected rows of {experts.width} in it")
        return msgspec.structs.replace(experts, rows=found, start=0, stop=0)

    return _changed(entry, read)


class _Rows:
    """The experts of a message, end to end."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def taken_from(self, entry: ProgressEntry) -> ProgressEntry:
        """Return an entry that names its experts instead of having them."""
        return _changed(entry, self._place) if _experts(entry.journal.values()) else entry

    def _place(self, experts: Experts) -> Experts:
        if not experts.rows:
            return experts
        start, self.size = self.size, self.size + len(experts.rows)
        self.parts.append(experts.rows)
        return msgspec.structs.replace(experts, rows=b"", start=start, stop=self.size)


def _experts(answers: Iterable[Answer]) -> list[Experts]:
    return [answer.routing for answer in answers if answer.routing is not None]


def _changed(entry: ProgressEntry, change: Callable[[Experts], Experts]) -> ProgressEntry:
    journal = {
        path: answer if answer.routing is None else msgspec.structs.replace(answer, routing=change(answer.routing))
        for path, answer in entry.journal.items()
    }
    return msgspec.structs.replace(entry, journal=journal)
