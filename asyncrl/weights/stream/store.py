"""Versions as chunks of a log, for hosts that share no folder."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from asyncrl.crash import crash_point
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.weights.directories import VERSION_NAME, CheckpointError
from asyncrl.weights.folders import Sink
from asyncrl.weights.rank_shards import Attempt, Describe, Filling, StoredFiles
from asyncrl.weights.store import Chunks
from asyncrl.weights.verify import TornVersion
from topics.wire import WireError

FILE, OFFSET = "file", "offset"  # headers of a chunk
_STREAM_NAME = re.compile(rf"{VERSION_NAME.pattern}[0-9a-f]{{16}}\Z", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}\Z", re.ASCII)
_OFFSET = re.compile(r"\d{1,18}\Z", re.ASCII)


class StreamIndex(msgspec.Struct):
    """The last message under the name of a version: the files that the chunks before it make up."""

    files: dict[str, int]  # sizes in bytes
    chunks: int


class StreamStore:
    """See `WeightStore`: versions have unique names, and a half-written one is never taken for another."""

    name = "stream"
    is_local = False

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    @contextmanager
    def share(self, attempt: Attempt, rank: int) -> Iterator[Filling]:
        """See `WeightStore.share`: the chunks of all ranks have one name, which nothing reads before its index."""
        name = f"{attempt.name}-{attempt.token}"
        folder = _StreamFolder(self._chunks, name, StreamIndex({}, 0))
        filling = Filling(folder)
        with _named_error(attempt):
            yield filling
            self._chunks.flush()
        filling.stored = StoredFiles(rank, name, folder.index.files, folder.index.chunks)
        crash_point("share.written")

    def complete(
        self, attempt: Attempt, digest: str, shares: Sequence[StoredFiles], describe: Describe, *, delta: bool = False
    ) -> str:
        """See `WeightStore.complete`. A version that is there already is there once more."""
        index = StreamIndex({}, sum(share.chunks for share in shares))
        for share in shares:
            index.files |= share.files
        name = f"{attempt.name}-{attempt.token}"
        folder = _StreamFolder(self._chunks, name, index)
        with _named_error(attempt):
            crash_point("weights.written")
            describe(folder)
            folder.finish()
        return name

    def check(self, location: str) -> None:
        if not _STREAM_NAME.match(location):
            raise WireError(f"its weights lie in {location[:200]!r}, which is no version in the store stream")

    async def has(self, location: str) -> bool:
        return await self._chunks.newest(location) is not None

    async def read(self, location: str, into: Path) -> Path:
        newest = await self._chunks.newest(location)
        try:
            index = msgspec.msgpack.decode(newest or b"", type=StreamIndex)
        except UNREADABLE as error:
            raise TornVersion(f"version {location} is not, or not wholly, in the stream: {error}") from error
        assembly = Assembly(into, index)

        def take(headers: Mapping[str, str], body: bytes) -> None:
            if FILE in headers:  # the index has none
                assembly.add(headers, body)

        await self._chunks.read(location, take)
        assembly.close()
        return into


@contextmanager
def _named_error(attempt: Attempt) -> Iterator[None]:
    try:
        yield
    except AsyncRLError as error:
        raise CheckpointError(f"version {attempt.version} could not be stored: {error}") from error


class _StreamFolder:
    """See `Folder`."""

    def __init__(self, chunks: Chunks, name: str, index: StreamIndex) -> None:
        self.index = index
        self._chunks = chunks
        self._name = name
        self._lock = threading.Lock()

    @contextmanager
    def file(self, name: str) -> Iterator[Sink]:
        """See `Folder.file`; it is durable after `finish`."""
        file = _StreamFile(self, name, self._chunks.chunk_bytes)
        yield file
        file.close()

    def put(self, file: str, offset: int, body: bytes) -> None:
        """Store a chunk of a file."""
        with self._lock:
            self.index.chunks += 1
            self.index.files[file] = max(self.index.files.get(file, 0), offset + len(body))
        self._chunks.put(self._name, {FILE: file, OFFSET: str(offset)}, body)

    def finish(self) -> None:
        """Store the index, once all chunks are stored."""
        self._chunks.flush()
        self._chunks.put(self._name, {}, msgspec.msgpack.encode(self.index))
        self._chunks.flush()


class _StreamFile:
    """Cuts written data into chunks: small blocks are joined, large ones are not copied twice."""

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
        TornVersion: the received data differ from the published data.
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
        if size is None or not _OFFSET.match(offset) or int(offset) + len(body) > size:
            raise TornVersion(f"a chunk of {len(body)} bytes at {offset[:20]!r} of file {name[:80]!r} has no place")
        mode = "r+b" if any(file == name for file, _ in self._chunks) else "wb"
        with (self._directory / name).open(mode) as file:  # buffered: without, a disk that is nearly full takes a part
            file.seek(int(offset))
            file.write(body)
        self._chunks[name, int(offset)] = len(body)

    def close(self) -> None:
        """Check that all is there."""
        if len(self._chunks) != self._index.chunks:
            raise TornVersion(f"{self._index.chunks - len(self._chunks)} of {self._index.chunks} chunks are missing")
