"""What stores of weights do for the learner, which writes, and for engines, which read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.weights.rank_shards import Attempt, Describe, Filling, StoredFiles


class Chunks(Protocol):
    """A log of chunks, written from several threads. Raises AsyncRLError where a chunk is not stored."""

    @property
    def chunk_bytes(self) -> int:
        """The greatest size of one."""

    def put(self, name: str, headers: Mapping[str, str], body: bytes) -> None:
        """Store a chunk under a name; several may be unacknowledged when it returns."""

    def flush(self) -> None:
        """Return when all chunks are stored."""

    async def newest(self, name: str) -> bytes | None:
        """Return the last chunk of a name; None without one."""

    async def read(self, name: str, take: Callable[[Mapping[str, str], bytes], None]) -> None:
        """Let a thread take headers and body of each chunk of a name, in the order of the log."""


class StorePlace(NamedTuple):
    """The places in which the stores of a run keep their bytes."""

    folder: Path
    chunks: Chunks


class WeightStore(Protocol):
    """Versions of weights, complete or absent, never overwritten; each is written by all ranks of a trainer.

    Readers have it by the location that `weights.published` names.
    """

    name: str  # of its kind
    is_local: bool  # a location is a directory of this host, which servers may read

    def share(self, attempt: Attempt, rank: int) -> AbstractContextManager[Filling]:
        """Give a rank a folder to fill with its tensors; after the block they are durable, but not readable yet.

        Raises:
            CheckpointError: they cannot be stored; no files remain.
        """

    def complete(
        self, attempt: Attempt, digest: str, shares: Sequence[StoredFiles], describe: Describe, *, delta: bool = False
    ) -> str:
        """Make a version of the shares of all ranks; returns its place, which may be published from then on.

        Args:
            digest: identity of the version.
            shares: of all ranks.
            describe: adds the files that describe them.
            delta: whether it is a difference to another version.

        Raises:
            CheckpointError: it cannot be stored; no files remain.
        """

    def check(self, location: str) -> None:
        """Refuse a location that cannot be of this run.

        Raises:
            WireError: it is none.
        """

    async def has(self, location: str) -> bool:
        """Return whether a version is in the store."""

    async def read(self, location: str, into: Path) -> Path:
        """Return a folder with the stored files of a version: their own folder, or `into` with a copy of them.

        Raises:
            TornVersion: its bytes are not there, or others.
            OSError: the disk refused it.
        """
