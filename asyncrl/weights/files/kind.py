"""The kind of the store `files`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.weights_settings import StoreKind

if TYPE_CHECKING:
    from asyncrl.weights.store import StorePlace, WeightStore


class Files(StoreKind):
    """Directories below that of the run."""

    def open(self, place: StorePlace) -> WeightStore:
        from asyncrl.weights.files.store import FileStore

        return FileStore(place.folder)


KIND = Files()
