"""Blobs: contents in chunks of a blob stream, stored before the message that names them."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import xxhash

from asyncrl.background import all_of
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_last
from asyncrl.crash import crash_point
from topics.actors import BLOB_KEPT, BLOB_STORED
from topics.payload_refs import ROUTING
from topics.table import Tables
from topics.topic import BLOBS, LEDGER_BLOBS, Stream, Topic
from topics.wire import INLINE_BYTES, WireError

HEADER_ROOM = 16 * 1024
_CHUNKS_AT_ONCE = 8
_REFERENCE = re.compile(
    r"^(?P<blob>\w{1,64}):(?P<size>\d{1,12}):(?P<digest>[0-9a-f]{2,32}):(?P<chunks>\d{1,7})\Z", re.ASCII
)
_BLOB_NAME = re.compile(r"(?P<topic>[a-z]+_[a-z]+)_(?P<sequence>\d{1,19})_[0-9a-f]{16}\Z")
BLOB = "blob"  # header of a record whose body is in a blob stream: id:size:xxh3:chunks
CHUNKS = {BLOBS: BLOB_STORED, LEDGER_BLOBS: BLOB_KEPT}  # topic of the chunks in each blob stream


class BlobMissing(BusError):
    """A message, or chunks of a blob, are missing, or the chunks differ from what the record states."""


class Blob(NamedTuple):
    """A body in a blob stream."""

    name: str
    size: int  # bytes
    digest: str  # xxh3_64 of the body
    chunks: int


def chunk_bytes(bus: Bus) -> int:
    """Return the largest size of a body inside a message, and of a chunk of a larger one."""
    return min(INLINE_BYTES, bus.max_payload - HEADER_ROOM)


def in_chunks(bus: Bus, body: bytes) -> list[bytes]:
    """Cut a body into chunks of the largest size."""
    size = chunk_bytes(bus)
    return [body[start : start + size] for start in range(0, len(body), size)]


async def store_blob(bus: Bus, topic: Topic[Any], chunks: Sequence[bytes], sequence: int = 0) -> str:
    """Store chunks, all acknowledged, and return the reference that names their blob.

    Args:
        sequence: that the message which names it has on a keeper's log, if it is not refused; 0 elsewhere.
    """
    blob, stored = f"{topic.name.replace('.', '_')}_{sequence}_{secrets.token_hex(8)}", CHUNKS[topic.blobs]
    digest = xxhash.xxh3_64()

    async def store(number: int, chunk: bytes) -> None:
        key = f"{blob}-{number}"
        await bus.store(stored.subject(bus.run, key), chunk, {MESSAGE_ID: f"{stored.name}:{key}"})
        crash_point("blob.inside")

    limit = asyncio.Semaphore(_CHUNKS_AT_ONCE)

    async def bounded(number: int, chunk: bytes) -> None:
        async with limit:
            await store(number, chunk)

    for chunk in chunks:
        digest.update(chunk)
    await all_of(*map(bounded, count(), chunks))
    crash_point("blob.stored")
    return f"{blob}:{sum(map(len, chunks))}:{digest.hexdigest()}:{len(chunks)}"


class BlobOwner(NamedTuple):
    """The message that a blob was stored for."""

    topic: Topic[Any]
    sequence: int  # on a keeper's log, if it was not refused; 0 elsewhere


def blob_owner(name: str, tables: Tables) -> BlobOwner | None:
    """Parse the name of a blob; None for one that is not of our making."""
    parts = _BLOB_NAME.match(name)
    topic = tables.by_name.get(parts["topic"].replace("_", ".")) if parts is not None else None
    return BlobOwner(topic, int(parts["sequence"])) if parts is not None and topic is not None else None


def blobs_of(record: Record) -> Iterator[Blob]:
    """The blobs that a record names: its body and its experts.

    Raises:
        WireError: a header is no reference to one.
    """
    for name in (BLOB, ROUTING):
        if name in record.headers:
            yield blob_named(record.headers[name])


def blob_named(reference: str) -> Blob:
    """Parse the blob reference in the header of a record.

    Raises:
        WireError: it is no such reference.
    """
    parts = _REFERENCE.match(reference)
    if parts is None:
        raise WireError(f"not a blob reference: {reference[:80]!r}")
    return Blob(parts["blob"], int(parts["size"]), parts["digest"], int(parts["chunks"]))


async def fetch_chunk(bus: Bus, stream: Stream, blob: Blob, number: int) -> bytes:
    """Fetch one chunk of a blob.

    Raises:
        BlobMissing: it is gone.
    """
    record = await read_last(bus, CHUNKS[stream], f"{blob.name}-{number}", stored=True)
    if record is None:
        raise BlobMissing(f"blob {blob.name}: chunk {number} of {blob.chunks} is gone")
    return record.data


async def fetch_blob(bus: Bus, stream: Stream, reference: str) -> bytes:
    """Fetch a whole blob.

    Raises:
        WireError: it is no reference.
        BlobMissing: chunks are gone, or differ from what the reference states.
    """
    blob = blob_named(reference)
    body = bytearray()
    for start in range(0, blob.chunks, _CHUNKS_AT_ONCE):
        numbers = range(start, min(blob.chunks, start + _CHUNKS_AT_ONCE))
        body += b"".join(await asyncio.gather(*(fetch_chunk(bus, stream, blob, number) for number in numbers)))
        if len(body) > blob.size:
            break  # a later message cannot make it true
    if len(body) != blob.size or xxhash.xxh3_64_hexdigest(body) != blob.digest:
        raise BlobMissing(f"blob {blob.name}: {len(body)} bytes found, {blob.size} expected, or their digest differs")
    return bytes(body)
