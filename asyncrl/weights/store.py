"""Weight stores by the name that `weights.published` gives them."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Protocol

from asyncrl.weights.files import FileStore
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

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions whose locations do not have these names; returns how many.

        Args:
            newest: lineage and version of the newest one published. A newer one may be about to be published.
        """
        ...


STORES: dict[str, Callable[[Path], WeightStore]] = {"files": FileStore}
"""Functions that open each store in a folder."""
