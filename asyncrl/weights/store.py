"""Weight stores by the name that `weights.published` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.weights.files import FileStore
from asyncrl.weights.rank_shards import Attempt, Describe, Filling, StoredFiles
from asyncrl.weights.stream import Chunks, StreamStore


class WeightStore(Protocol):
    """Versions of weights, complete or absent, never overwritten; each is written by all ranks of a trainer."""

    name: str  # in `STORES`

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


class StorePlace(NamedTuple):
    """The places in which the stores of a run keep their bytes."""

    folder: Path
    chunks: Chunks


STORES: dict[str, Callable[[StorePlace], WeightStore]] = {
    "files": lambda place: FileStore(place.folder),
    "stream": lambda place: StreamStore(place.chunks),
}
"""Functions that open each store, by its name in `weights.store`."""
