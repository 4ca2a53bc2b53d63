"""The kind of the store `stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.weights_settings import StoreCapability, StoreKind

if TYPE_CHECKING:
    from asyncrl.weights.store import StorePlace, WeightStore


class Stream(StoreKind):
    """Chunks on the NATS server."""

    capabilities = frozenset({StoreCapability.HOSTS, StoreCapability.SERVER})

    def open(self, place: StorePlace) -> WeightStore:
        from asyncrl.weights.stream.store import StreamStore

        return StreamStore(place.chunks)


KIND = Stream()
