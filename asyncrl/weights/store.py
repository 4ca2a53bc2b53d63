"""Weight stores by the name that `weights.published` gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.weights.delta import Delta
from asyncrl.weights.files import FileStore
from asyncrl.weights.stream import Chunks, StreamStore
from asyncrl.weights.tensors import Files
from topics.weights import WeightsPublished


class WeightStore(Protocol):
    """Versions of weights, complete or absent, never overwritten."""

    def publish(self, tensors: Files, source: Path | None, *, lineage: int, version: int) -> WeightsPublished:
        """Store tensors as a version, in one pass that hashes them; what is returned may be published from then on.

        A version that is there already, as after a replay, is kept, or replaced where it is torn.

        Args:
            source: model directory whose configuration and tokenizer belong to the tensors, if there is one.

        Raises:
            CheckpointError: it cannot be stored; nothing is left behind.
        """
        ...

    def publish_delta(self, delta: Delta, *, run: str, base: str, lineage: int, version: int) -> WeightsPublished:
        """Store a version as its difference to another one.

        Args:
            run: id of the run; a difference belongs to no other.
            base: key of the version that it is a difference to.

        Raises:
            CheckpointError: it cannot be stored; nothing is left behind.
        """
        ...


class StorePlace(NamedTuple):
    """The places in which the stores of a run keep their bytes."""

    folder: Path
    chunks: Chunks


STORES: dict[str, Callable[[StorePlace], WeightStore]] = {
    "files": lambda place: FileStore(place.folder),
    "stream": lambda place: StreamStore(place.chunks),
}
"""Functions that open each store, by its name in `weights.store`."""
