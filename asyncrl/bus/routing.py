"""Experts of tokens in a separate blob, cut by groups of layers, so that a reader fetches only its own layers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from asyncrl.algorithms.rows import Routed
from asyncrl.bus.blobs import Blob, BlobMissing, blob_named, chunk_bytes, fetch_chunk, store_blob
from asyncrl.bus.connection import Bus
from asyncrl.bus.sealing import open_under, seal_under
from topics.payload_refs import Routing
from topics.topic import BLOBS
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.wire import UInt8Array, WireError

_TAG = 40  # bytes that sealing adds to a chunk
_AT_ONCE = 8


class Part(Protocol):
    """The layers of a model and the tokens of its documents that a reader has."""

    def layers(self, count: int) -> Sequence[range]:
        """Return the own layers of this many."""

    def tokens(self, length: int) -> Sequence[range]:
        """Return the own tokens of a segment of this many."""


class Whole:
    """See `Part`: a reader that has everything."""

    def layers(self, count: int) -> Sequence[range]:
        return [range(count)]

    def tokens(self, length: int) -> Sequence[range]:
        return [range(length)]


class Cut(NamedTuple):
    """A cut of experts into chunks, so that each reader finds its own."""

    layers: Sequence[int]  # bounds of the layers of a chunk: 0, ..., all that the model has
    readers: int  # that share the tokens of a segment


class _Chunk(NamedTuple):
    """A chunk of the blob."""

    number: int
    tokens: range
    layers: range

    def is_of(self, tokens: Sequence[range], layers: Sequence[range]) -> bool:
        """Return whether it has some of these."""
        return any(_meet(self.tokens, one) for one in tokens) and any(_meet(self.layers, one) for one in layers)


async def store_routing(bus: Bus, result: TrajectoryGenerated, rows: Sequence[UInt8Array], cut: Cut) -> Routing | None:
    """Store the experts of a result's tokens, all acknowledged, and return the reference; None without known experts.

    Args:
        rows: [T, B] of each segment; see `Answer.routing`.

    Raises:
        SecretGone: the result is sealed under a data key that is not there.
    """
    whole, layers = np.concatenate(rows), list(cut.layers)
    known = whole.any(1)
    if not known.any():
        return None
    width = whole.shape[1] // layers[-1]
    largest = max(last - first for first, last in pairwise(layers)) * width
    # Where tokens are shared, a reader fetches the whole chunks in which its own begin and end: these are smaller.
    most = chunk_bytes(bus) // (4 * cut.readers if cut.readers > 1 else 1)
    step = max(1, most // largest)
    tokens = [*range(0, len(whole), step), len(whole)]
    shaped = whole.reshape(len(whole), layers[-1], width)
    chunks = [_bytes_of(shaped, one) for one in _chunks(tokens, layers)]
    if result.secret:
        names = (_name(result, number) for number in range(len(chunks)))
        chunks = [await seal_under(bus, result.secret, next(names), chunk) for chunk in chunks]
    blob = await store_blob(bus, TRAJECTORY_GENERATED, chunks)
    digests = [xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks]
    return Routing(blob, width, layers, tokens, digests, np.packbits(known).tobytes())


async def read_routing(bus: Bus, result: TrajectoryGenerated, part: Part) -> list[Routed]:
    """Fetch the experts of a result's tokens that a reader has; of all others it is known whether they were recorded.

    Returns:
        One for each segment; empty if no engine returned experts.

    Raises:
        BlobMissing: a chunk is gone or altered.
        WireError: the message contradicts itself.
        SecretGone: it is sealed under a data key that is not there.
    """
    routing = result.routing
    if routing is None:
        return []
    lengths = [len(segment.tokens) for segment in result.segments]
    ends = np.cumsum(lengths)
    blob = _checked(routing, int(ends[-1]), sealed=bool(result.secret))
    found = np.zeros((int(ends[-1]), routing.layers[-1], routing.width), np.uint8)
    tokens = [
        range(end - length + one.start, end - length + one.stop)
        for length, end in zip(lengths, ends.tolist(), strict=True)
        for one in part.tokens(length)
    ]
    limit, layers = asyncio.Semaphore(_AT_ONCE), part.layers(routing.layers[-1])

    async def fetch(chunk: _Chunk) -> None:
        async with limit:
            stored = await fetch_chunk(bus, BLOBS, blob, chunk.number)
        if (digest := xxhash.xxh3_64_hexdigest(stored)) != routing.digests[chunk.number]:
            expected = routing.digests[chunk.number]
            raise BlobMissing(f"blob {blob.name}: chunk {chunk.number} has digest {digest}, {expected} was stored")
        if result.secret:
            stored = await open_under(bus, result.secret, _name(result, chunk.number), stored)
        shape = len(chunk.tokens), len(chunk.layers), routing.width
        if len(stored) != math.prod(shape):
            raise WireError(f"blob {blob.name}: chunk {chunk.number} has {len(stored)} bytes, expected {shape}")
        place = slice(chunk.tokens.start, chunk.tokens.stop), slice(chunk.layers.start, chunk.layers.stop)
        found[place] = np.frombuffer(stored, np.uint8).reshape(shape)

    wanted = [one for one in _chunks(routing.tokens, routing.layers) if one.is_of(tokens, layers)]
    await asyncio.gather(*map(fetch, wanted))
    known = np.unpackbits(np.frombuffer(routing.known, np.uint8), count=len(found)).astype(np.bool_)
    cuts = ends[:-1].tolist()
    pairs = zip(np.split(found.reshape(len(found), -1), cuts), np.split(known, cuts), strict=True)
    return [Routed(rows, known) for rows, known in pairs]


def _chunks(tokens: Sequence[int], layers: Sequence[int]) -> list[_Chunk]:
    places = enumerate(product(pairwise(tokens), pairwise(layers)))
    return [_Chunk(number, range(*of_tokens), range(*of_layers)) for number, (of_tokens, of_layers) in places]


def _bytes_of(shaped: UInt8Array, chunk: _Chunk) -> bytes:
    tokens, layers = chunk.tokens, chunk.layers
    return shaped[tokens.start : tokens.stop, layers.start : layers.stop].tobytes()


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _name(result: TrajectoryGenerated, number: int) -> bytes:
    return f"{TRAJECTORY_GENERATED.name}:{result.trajectory_id}:{result.attempt}:{result.delivery}:{number}".encode()


def _checked(routing: Routing, tokens: int, *, sealed: bool) -> Blob:
    """Return the blob, of which as much is fetched as the message says, and no more."""
    blob, chunks = blob_named(routing.blob), (len(routing.tokens) - 1) * (len(routing.layers) - 1)
    bounds = (routing.tokens, routing.layers)
    rising = all(found[:1] == [0] and all(a < b for a, b in pairwise(found)) and len(found) > 1 for found in bounds)
    size = tokens * routing.layers[-1] * routing.width + sealed * _TAG * chunks if rising else -1
    numbers = (routing.tokens[-1:], blob.chunks, len(routing.digests), blob.size, len(routing.known))
    if not rising or numbers != ([tokens], chunks, chunks, size, -(-tokens // 8)):
        raise WireError(
            f"experts of {tokens} tokens in blob {routing.blob}: tokens {routing.tokens[:3]} to {routing.tokens[-1:]}, "
            f"layers {routing.layers[:3]} to {routing.layers[-1:]}, {len(routing.digests)} digests and "
            f"{len(routing.known)} bytes of marks do not belong together"
        )
    return blob
