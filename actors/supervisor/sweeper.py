"""The sweeper, a part of the trimmer: purges from the blob streams what belongs to no message that is needed.

- Of each keeper the newest two snapshots keep their blobs: the newest, and the one before it, which a keeper that
  starts at this moment may be reading.
- Chunks that no message names are what a process left that died before it stored the message, or whose message was
  refused. They are purged once no message that names them can still be published, and all logs that could hold one were
  read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from actors.runtime.actor import Context
from asyncrl.bus.blobs import CHUNKS, Blob, blob_owner, blobs_of
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused, BusUnreachable
from asyncrl.bus.log import Record, read_message, retry_until_deadline, stream_info
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.weights.directories import VERSION_NAME
from topics.topic import BLOBS, LEDGER_BLOBS, WEIGHTS, Stream, Topic
from topics.weights import WEIGHTS_STORED
from topics.wire import WireError

_EVERY_S = {BLOBS: 2.0, LEDGER_BLOBS: 30.0}  # between two listings of a blob stream
_KEPT = 2  # snapshots of each keeper
_AT_ONCE = 32  # purges that run at once
_NOT_PURGED = 10051  # the server could not write: its disk is full


class Sweeper:
    """Lists the contents of the blob streams, again and again."""

    def __init__(self, context: Context) -> None:
        self._bus = context.bus
        self._context = context
        # A blob's chunks and its message are each acknowledged within the deadline, or given up.
        self._under_way_s = 2 * context.config.nats.publish_deadline_s
        self._looked_at = dict.fromkeys(_EVERY_S, 0.0)
        self._named: dict[Stream, set[str]] = defaultdict(set)  # blobs that a message was found to name
        self._read: dict[str, int] = {}  # how far the messages of a topic were read, by the name of the topic
        self._alone: dict[Stream, dict[str, tuple[int, float]]] = {}  # blobs nothing names: chunks, and since when

    async def sweep(self) -> None:
        """Purge what can go."""
        for stream, every_s in _EVERY_S.items():
            if time.monotonic() < self._looked_at[stream] + every_s:
                continue
            self._looked_at[stream] = time.monotonic()
            chunks = await self._listed(stream)
            self._named[stream] &= chunks.keys()
            alone = await self._unnamed(stream, chunks)
            gone = [*self._replaced(chunks.keys() - alone), *await self._orphans(stream, chunks, alone)]
            purged = await purge(self._bus, stream, [_chunk(self._bus, stream, key) for n in gone for key in chunks[n]])
            if purged:
                self._context.log.info("blobs purged", stream=stream.name, blobs=len(gone), chunks=purged)

    def _replaced(self, names: Iterable[str]) -> list[str]:
        """Of the blobs of snapshots, all but the newest of each keeper."""
        snapshots: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for name in names:
            owner = blob_owner(name, self._bus.tables)
            if owner is not None and owner.topic.replaced:
                snapshots[owner.topic.name].append((owner.sequence, name))
        return [name for known in snapshots.values() for _, name in sorted(known)[:-_KEPT]]

    async def _orphans(self, stream: Stream, chunks: dict[str, list[str]], alone: list[str]) -> list[str]:
        """The blobs that no message has named, and that have not grown, for longer than a publication may take."""
        before, now = self._alone.get(stream, {}), time.monotonic()
        seen = {name: (len(chunks[name]), before.get(name, (0, now))) for name in alone}
        self._alone[stream] = {name: last if last[0] == count else (count, now) for name, (count, last) in seen.items()}
        due = [name for name, (_, since) in self._alone[stream].items() if now > since + self._under_way_s]
        if due:
            self._read.clear()  # nothing goes but by what the logs hold now
        return await self._unnamed(stream, due)

    async def _unnamed(self, stream: Stream, names: Iterable[str]) -> list[str]:
        """Those of some blobs that no message names. Of those that nothing here stores, LEDGER_BLOBS keeps all."""
        named = self._named[stream]
        unknown = {name: blob_owner(name, self._bus.tables) for name in names if name not in named}
        owners = {owner for owner in unknown.values() if owner is not None}
        for topic in {owner.topic for owner in owners if not owner.sequence}:
            await self._read_on(topic)
        for topic, sequence in owners:
            if sequence and (record := await read_message(self._bus, topic.stream, sequence)) is not None:
                self._note(topic, record)
        return [name for name, owner in unknown.items() if name not in named and (owner or stream is BLOBS)]

    async def _read_on(self, topic: Topic[Any]) -> None:
        """Find which blobs the messages of a topic name, after those that were read before."""

        def note(record: Record) -> None:
            self._note(topic, record)
            self._read[topic.name] = record.sequence

        subjects, after = [topic.pattern(self._bus.run)], self._read.get(topic.name, 0)
        await read_merged(
            self._bus,
            [Part(topic.stream, subjects=subjects, headers_only=True, after=after)],
            lambda _topic, _message, record: note(record),
            lambda record, _error: note(record),
        )

    def _note(self, topic: Topic[Any], record: Record) -> None:
        """Note the blobs that a message of a topic names."""
        with contextlib.suppress(WireError):  # a header names none
            self._named[topic.blobs].update(blob.name for blob in blobs_of(record))

    async def _listed(self, stream: Stream) -> dict[str, list[str]]:
        """Keys of the chunks that lie in a blob stream, by the name of their blob."""
        pattern = CHUNKS[stream].pattern(self._bus.run)
        found: dict[str, list[str]] = defaultdict(list)
        offset, total = 0, 1
        while offset < total:
            info = await stream_info(self._bus, stream, {"subjects_filter": pattern, "offset": offset})
            subjects = info["state"].get("subjects") or {}
            for subject in subjects:
                key = subject.rsplit(".", 1)[1]
                found[key.rpartition("-")[0]].append(key)
            offset, total = offset + len(subjects), info.get("total", 0) if subjects else 0
        return found


async def purge_blobs(bus: Bus, stream: Stream, blobs: Iterable[Blob]) -> int:
    """Purge the chunks of blobs; returns how many there were."""
    left, total = list(blobs), 0
    while left:
        some, left = left[:_AT_ONCE], left[_AT_ONCE:]
        total += sum(await asyncio.gather(*(_purge_blob(bus, stream, blob) for blob in some)))
    return total


async def _purge_blob(bus: Bus, stream: Stream, blob: Blob) -> int:
    total = 0
    for start in range(0, blob.chunks, _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, blob.chunks))
        purged = await purge(bus, stream, [_chunk(bus, stream, f"{blob.name}-{number}") for number in numbers])
        total += purged
        if not purged:
            break  # a header may claim any number of chunks
    return total


async def purge_versions(bus: Bus, keep: Container[str], newest: tuple[int, int]) -> int:
    """Purge the versions in the store `stream` that do not have these names; returns how many there were.

    Args:
        newest: lineage and version of the newest one published. It may be about to be published once more.
    """
    info = await stream_info(bus, WEIGHTS, {"subjects_filter": WEIGHTS_STORED.pattern(bus.run)})
    old = []
    for subject in info["state"].get("subjects") or {}:
        name = subject.rsplit(".", 1)[1]
        found = VERSION_NAME.match(name)
        if found and name not in keep and (int(found["lineage"]), int(found["number"])) < newest:
            old.append({"filter": subject})
    await purge(bus, WEIGHTS, old)
    return len(old)


async def is_stored(bus: Bus, folder: Path, name: str) -> bool:
    """Return whether a version of this name is in either store."""
    return (folder / name).is_dir() or await ChunkLog(bus, WEIGHTS_STORED).newest(name) is not None


async def purge(bus: Bus, stream: Stream, wanted: list[dict[str, Any]]) -> int:
    """Purge messages of a stream, one request each; returns how many there were.

    Raises:
        BusGone: the server is away, or its disk full, until the deadline of publishes.
    """
    subject = f"STREAM.PURGE.{stream.full_name(bus.run)}"

    async def ask(body: dict[str, Any]) -> int:
        try:
            return int((await bus.api(subject, body))["purged"])
        except BusRefused as error:
            if error.code != _NOT_PURGED:
                raise
            raise BusUnreachable(str(error)) from error

    async def purge_one(body: dict[str, Any]) -> int:
        return await retry_until_deadline(bus, lambda: ask(body))

    count = 0
    for start in range(0, len(wanted), _AT_ONCE):
        count += sum(await asyncio.gather(*map(purge_one, wanted[start : start + _AT_ONCE])))
    return count


def _chunk(bus: Bus, stream: Stream, key: str) -> dict[str, Any]:
    return {"filter": CHUNKS[stream].subject(bus.run, key)}
