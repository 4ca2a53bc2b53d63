"""The side of each weight store that engines read: a new store has a class here, and a row of `SOURCES`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.bus.chunks import read_chunks, read_newest_chunk
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.errors import UNREADABLE
from asyncrl.run.directory import RunFiles
from asyncrl.weights.directories import VERSION_NAME
from asyncrl.weights.stream import FILE, Assembly, StreamIndex
from asyncrl.weights.verify import TornVersion
from topics.weights import WEIGHTS_STORED
from topics.wire import WireError

_STREAM_NAME = re.compile(rf"{VERSION_NAME.pattern}[0-9a-f]{{16}}\Z", re.ASCII)


class Source(Protocol):
    """The versions of one store, by the location that `weights.published` names."""

    is_local: bool  # a location is a directory of this host, which servers may read

    def check(self, location: str) -> None:
        """Refuse a location that cannot be of this run.

        Raises:
            WireError: it is none.
        """

    async def read(self, location: str, into: Path) -> Path:
        """Return a folder with the stored files of a version: their own folder, or `into` with a copy of them.

        Raises:
            TornVersion: its bytes are not there, or others.
            OSError: the disk refused it.
        """


class SharedFolder:
    """See `Source`: the run's directory, which this host has."""

    is_local = True

    def __init__(self, _bus: Bus, files: RunFiles) -> None:
        self._folder = files.weights.resolve()  # a run may be resumed by another of the paths that lead to it

    def check(self, location: str) -> None:
        place = Path(location)
        if place.name == ".." or place.parent.resolve() != self._folder:  # a link in there is the owner's own
            raise WireError(f"its weights lie in {location[:200]!r}, not in this run's store {self._folder}")

    async def read(self, location: str, into: Path) -> Path:
        return Path(location)


class StoredChunks:
    """See `Source`: chunks on the NATS server."""

    is_local = False

    def __init__(self, bus: Bus, _files: RunFiles) -> None:
        self._bus = bus

    def check(self, location: str) -> None:
        if not _STREAM_NAME.match(location):
            raise WireError(f"its weights lie in {location[:200]!r}, which is no version in the store stream")

    async def read(self, location: str, into: Path) -> Path:
        newest = await read_newest_chunk(self._bus, WEIGHTS_STORED, location)
        try:
            index = msgspec.msgpack.decode(newest or b"", type=StreamIndex)
        except UNREADABLE as error:
            raise TornVersion(f"version {location} is not, or not wholly, in the stream: {error}") from error
        assembly = Assembly(into, index)

        def take(record: Record) -> None:
            if FILE in record.headers:  # the index has none
                assembly.add(record.headers, record.data)

        await read_chunks(self._bus, WEIGHTS_STORED, location, take)
        assembly.close()
        return into


SOURCES: dict[str, Callable[[Bus, RunFiles], Source]] = {"files": SharedFolder, "stream": StoredChunks}
"""By the names in `asyncrl.weights.store.STORES`."""
