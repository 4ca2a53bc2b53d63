"""The sweeper, a part of the trimmer: purges from the blob streams what belongs to no message that anybody needs.

- Of each keeper the newest two snapshots keep their blobs: the newest, and the one before it, which a keeper that
  starts at this moment may be reading.
- Chunks that no message names are what a process left that died before it stored the message, or whose message was
  refused. They go once nothing can be under way any more that names them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from actors.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import patiently, read_message
from asyncrl.bus.talk import BLOB, CHUNKS, Blob, blob_named, blob_owner
from topics.topic import BLOBS, LEDGER_BLOBS, TRAJECTORIES, Stream
from topics.wire import WireError

_EVERY_S = {BLOBS: 2.0, LEDGER_BLOBS: 30.0}  # between two listings of a blob stream
_KEPT = 2  # snapshots of each keeper
_AT_ONCE = 32  # purges under way


class Sweeper:
    """Lists what lies in the blob streams, again and again."""

    def __init__(self, context: Context, in_use: Callable[[], set[str]] | None) -> None:
        """
        Args:
            in_use: names of the blobs that messages of TRAJECTORIES name; None where nobody reads them.
        """
        self._bus = context.bus
        self._context = context
        self._in_use = in_use
        # A blob's chunks and its message are each acknowledged within the deadline, or given up.
        self._under_way_s = 2 * context.cast.nats.publish_deadline_s
        self._looked_at = dict.fromkeys(_EVERY_S, 0.0)
        self._named: set[str] = set()  # blobs that a message on a keeper's log was found to name
        self._alone: dict[Stream, dict[str, tuple[int, float]]] = {}  # blobs nothing names: chunks, and since when

    async def sweep(self, arrived: Callable[[], Awaitable[bool]]) -> None:
        """Purge what can go.

        Args:
            arrived: waits until all that is stored in TRAJECTORIES is known to `in_use`; False if that does not come.
        """
        for stream, every_s in _EVERY_S.items():
            if time.monotonic() < self._looked_at[stream] + every_s:
                continue
            self._looked_at[stream] = time.monotonic()
            chunks = await self._listed(stream)
            alone = await self._unnamed(stream, chunks)
            gone = [*self._replaced(chunks.keys() - alone), *await self._orphans(stream, chunks, alone, arrived)]
            purged = await purge(self._bus, stream, [_chunk(self._bus, stream, key) for n in gone for key in chunks[n]])
            self._named.difference_update(gone)
            if purged:
                self._context.log.info("blobs purged", stream=stream.name, blobs=len(gone), chunks=purged)

    def _replaced(self, names: Iterable[str]) -> list[str]:
        """Of the blobs of snapshots, all but the newest of each keeper."""
        snapshots: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for name in names:
            owner = blob_owner(name)
            if owner is not None and owner.topic.replaced:
                snapshots[owner.topic.name].append((owner.sequence, name))
        return [name for known in snapshots.values() for _, name in sorted(known)[:-_KEPT]]

    async def _orphans(
        self, stream: Stream, chunks: dict[str, list[str]], alone: list[str], arrived: Callable[[], Awaitable[bool]]
    ) -> list[str]:
        """The blobs that nothing has named, and that have not grown, for as long as something may be under way."""
        before, now = self._alone.get(stream, {}), time.monotonic()
        seen = {name: (len(chunks[name]), before.get(name, (0, now))) for name in alone}
        self._alone[stream] = {name: last if last[0] == count else (count, now) for name, (count, last) in seen.items()}
        due = [name for name, (_, since) in self._alone[stream].items() if now > since + self._under_way_s]
        if not due or not await arrived():
            return []
        return await self._unnamed(stream, due)

    async def _unnamed(self, stream: Stream, names: Iterable[str]) -> list[str]:
        """Those of some blobs that no message names."""
        in_use = self._in_use() if self._in_use is not None else None
        return [name for name in names if await self._is_alone(stream, name, in_use)]

    async def _is_alone(self, stream: Stream, name: str, in_use: set[str] | None) -> bool:
        """Whether no message names a blob; of those that nobody can look up all are taken for named."""
        owner = blob_owner(name)
        if owner is None:
            return stream is BLOBS
        if not owner.sequence:
            return owner.topic.stream is TRAJECTORIES and in_use is not None and name not in in_use
        if name not in self._named:
            record = await read_message(self._bus, owner.topic.stream, owner.sequence)
            try:
                if record is None or blob_named(record.headers.get(BLOB, "")).name != name:
                    return True
            except WireError:
                return True
            self._named.add(name)
        return False

    async def _listed(self, stream: Stream) -> dict[str, list[str]]:
        """Keys of the chunks that lie in a blob stream, by the name of their blob."""
        pattern = CHUNKS[stream].pattern(self._bus.run)
        found: dict[str, list[str]] = defaultdict(list)
        offset, total = 0, 1
        while offset < total:
            info = await self._info(stream, {"subjects_filter": pattern, "offset": offset})
            subjects = info["state"].get("subjects") or {}
            for subject in subjects:
                key = subject.rsplit(".", 1)[1]
                found[key.rpartition("-")[0]].append(key)
            offset, total = offset + len(subjects), info.get("total", 0) if subjects else 0
        return found

    async def _info(self, stream: Stream, body: dict[str, Any]) -> dict[str, Any]:
        call = f"STREAM.INFO.{stream.full_name(self._bus.run)}"
        return await patiently(self._bus, lambda: self._bus.api(call, body))


async def purge_blobs(bus: Bus, stream: Stream, blobs: Iterable[Blob]) -> int:
    """Purge the chunks of blobs; returns how many there were."""
    total = 0
    for blob in blobs:
        for start in range(0, blob.chunks, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, blob.chunks))
            purged = await purge(bus, stream, [_chunk(bus, stream, f"{blob.name}-{number}") for number in numbers])
            total += purged
            if not purged:
                break  # a header may claim any number of chunks
    return total


async def purge(bus: Bus, stream: Stream, wanted: list[dict[str, Any]]) -> int:
    """Purge messages of a stream, each as one request tells; returns how many there were."""
    subject = f"STREAM.PURGE.{stream.full_name(bus.run)}"

    async def purge_one(body: dict[str, Any]) -> int:
        return int((await patiently(bus, lambda: bus.api(subject, body)))["purged"])

    count = 0
    for start in range(0, len(wanted), _AT_ONCE):
        count += sum(await asyncio.gather(*map(purge_one, wanted[start : start + _AT_ONCE])))
    return count


def _chunk(bus: Bus, stream: Stream, key: str) -> dict[str, Any]:
    return {"filter": CHUNKS[stream].subject(bus.run, key)}
