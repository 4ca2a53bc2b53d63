"""Folders that the files of a version are written into, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, block: bytes | memoryview, /) -> object:
        """Append a block, all of it.

        Raises:
            OSError: the disk refused it.
        """


class Folder(Protocol):
    """A place for files. Several threads may write one each."""

    def file(self, name: str) -> AbstractContextManager[Sink]:
        """Open a new file, which is durable after the block."""


class DiskFolder:
    """See `Folder`: an existing directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def file(self, name: str) -> Iterator[Sink]:
        with (self._path / name).open("wb", buffering=0) as file:
            yield _DiskFile(file.fileno())
            os.fsync(file.fileno())


class _DiskFile:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def write(self, block: bytes | memoryview) -> None:
        """Write a block; a disk that is nearly full takes a part of it before it refuses the rest."""
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(self._handle, rest) :]
