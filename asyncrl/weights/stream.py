"""The weight store `stream`: versions as chunks of a log, for hosts that share no folder."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.weights.delta import Delta, write_delta
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.files import write_model
from asyncrl.weights.folders import Sink
from asyncrl.weights.tensors import Files, digest_of
from asyncrl.weights.verify import MANIFEST, TornVersion
from topics.weights import WeightsPublished

FILE, OFFSET = "file", "offset"  # headers of a chunk
_FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}\Z", re.ASCII)


class Chunks(Protocol):
    """A log of chunks, written from several threads. Raises AsyncRLError where a chunk is not stored."""

    chunk_bytes: int  # greatest size of one

    def put(self, name: str, headers: Mapping[str, str], body: bytes) -> None:
        """Store a chunk under a name; several may be under way when it returns."""
        ...

    def flush(self) -> None:
        """Return when all chunks are stored."""
        ...


class StreamIndex(msgspec.Struct):
    """The last message under the name of a version: the files that the chunks before it make up."""

    files: dict[str, int]  # sizes in bytes
    chunks: int


class StreamStore:
    """Versions under names of their own: one that was left half-written is never taken for another."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def publish(self, tensors: Files, source: Path | None, *, lineage: int, version: int) -> WeightsPublished:
        """See `WeightStore.publish`. A version that is there already is written once more."""
        with self._writing(lineage, version) as (folder, name):
            manifest = write_model(folder, tensors, source)
            with folder.file(MANIFEST) as file:
                file.write(manifest)
        return WeightsPublished(lineage, version, digest_of(manifest), "stream", name)

    def publish_delta(self, delta: Delta, *, run: str, base: str, lineage: int, version: int) -> WeightsPublished:
        """See `WeightStore.publish_delta`."""
        message = WeightsPublished(lineage, version, delta.digest, "stream", "", base=base)
        with self._writing(lineage, version) as (folder, message.location):
            write_delta(folder, delta, run=run, base=base, key=message.key)
        return message

    @contextmanager
    def _writing(self, lineage: int, version: int) -> Iterator[tuple[_StreamFolder, str]]:
        """Give a folder to fill, and its name; it is all stored behind the block."""
        name = f"lineage{lineage}-v{version:06d}-{secrets.token_hex(8)}"
        folder = _StreamFolder(self._chunks, name)
        try:
            yield folder, name
            folder.finish()
        except AsyncRLError as error:
            raise CheckpointError(f"version {version} could not be stored: {error}") from error


class _StreamFolder:
    """See `Folder`."""

    def __init__(self, chunks: Chunks, name: str) -> None:
        self._chunks = chunks
        self._name = name
        self._lock = threading.Lock()
        self._index = StreamIndex({}, 0)

    @contextmanager
    def file(self, name: str) -> Iterator[Sink]:
        """See `Folder.file`; it is durable behind `finish`."""
        file = _StreamFile(self, name, self._chunks.chunk_bytes)
        yield file
        file.close()

    def put(self, file: str, offset: int, body: bytes) -> None:
        """Store a chunk of a file."""
        with self._lock:
            self._index.chunks += 1
            self._index.files[file] = max(self._index.files.get(file, 0), offset + len(body))
        self._chunks.put(self._name, {FILE: file, OFFSET: str(offset)}, body)

    def finish(self) -> None:
        """Store the index, once all chunks are stored."""
        self._chunks.flush()
        self._chunks.put(self._name, {}, msgspec.msgpack.encode(self._index))
        self._chunks.flush()


class _StreamFile:
    """Cuts what is written into chunks: small blocks are put together, large ones are not copied twice."""

    def __init__(self, folder: _StreamFolder, name: str, chunk_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._chunk_bytes = chunk_bytes
        self._held = bytearray()
        self._offset = 0

    def write(self, block: bytes | memoryview) -> None:
        """Append a block."""
        for start in range(0, len(block), self._chunk_bytes):
            piece = block[start : start + self._chunk_bytes]
            if len(self._held) + len(piece) > self._chunk_bytes:
                self._put(bytes(self._held))
                self._held.clear()
            if len(piece) * 2 > self._chunk_bytes and not self._held:
                self._put(bytes(piece))
            else:
                self._held += piece

    def close(self) -> None:
        """Store the rest."""
        self._put(bytes(self._held))

    def _put(self, body: bytes) -> None:
        self._folder.put(self._name, self._offset, body)
        self._offset += len(body)


class Assembly:
    """Files that are put together from the chunks of a version.

    Raises, from every method:
        TornVersion: what came is not what was published.
        OSError: the disk refused it.
    """

    def __init__(self, directory: Path, index: StreamIndex) -> None:
        wrong = [name for name in index.files if not _FILE_NAME.match(name)]
        if wrong:
            raise TornVersion(f"{wrong[0][:80]!r} is no name of a file")
        self._directory = directory
        self._index = index
        self._chunks: dict[tuple[str, int], int] = {}  # sizes, by file and offset

    def add(self, headers: Mapping[str, str], body: bytes) -> None:
        """Write a chunk to its place; the same one may come twice."""
        name, offset = headers.get(FILE, ""), headers.get(OFFSET, "")
        size = self._index.files.get(name)
        if size is None or not offset.isdecimal() or int(offset) + len(body) > size:
            raise TornVersion(f"a chunk of {len(body)} bytes at {offset[:20]!r} of file {name[:80]!r} has no place")
        mode = "r+b" if any(file == name for file, _ in self._chunks) else "wb"
        with (self._directory / name).open(mode, buffering=0) as file:
            file.seek(int(offset))
            file.write(body)
        self._chunks[name, int(offset)] = len(body)

    def close(self) -> None:
        """Check that all is there."""
        if len(self._chunks) != self._index.chunks:
            raise TornVersion(f"{self._index.chunks - len(self._chunks)} of {self._index.chunks} chunks are missing")
