"""Versions as a learner writes them, full or as differences, and what engines answer."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from actors.runtime.actor import Context
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.weights_settings import store_kind
from asyncrl.run.directory import RunFiles
from asyncrl.training.publisher import Publisher
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.store import StorePlace
from asyncrl.weights.tensors import HostTensor, digest_of
from asyncrl.weights.versions import publish as publish_version
from topics.engines import EngineReady
from topics.table import BUILT_IN
from topics.topic import ENGINES
from topics.weights import WEIGHTS_STORED, WeightsPublished, WeightsRefused
from topics.wire import decode


class Copies:
    """A trainer whose weights the test changes."""

    source = config = adapter = None

    def __init__(self, dtype: str = "float32") -> None:
        rng = np.random.default_rng(1)
        self.arrays = {
            name: rng.standard_normal(size).astype("<f4") for name, size in (("a", 50_000), ("b", 7), ("c", 0))
        }
        self.dtype = dtype

    def copy_weights(self, *, whole: bool = False):
        return self

    def files(self) -> dict[str, list[HostTensor]]:
        tensors = []
        for name, array in self.arrays.items():
            values = (array.view("<u4") >> 16).astype("<u2") if self.dtype == "bfloat16" else array.copy()
            tensors.append(HostTensor(name, self.dtype, [len(array)], values.view(np.uint8)))
        return {"model": tensors}

    def nudge(self, share: float, seed: int) -> None:
        """Change a share of all elements."""
        rng = np.random.default_rng(seed)
        for array in self.arrays.values():
            array[rng.random(len(array)) < share] += np.float32(0.01)


EMPTY = digest_of(b"")
"""Digest of every version without tensors."""


def empty_version(files: RunFiles, version: int) -> WeightsPublished:
    """A version without tensors, in the store of a run."""
    return publish_version(FileStore(files.weights.absolute()), {}, None, lineage=0, version=version)


class Versions:
    """Writes version after version, each as a difference to the one before where that is possible."""

    def __init__(self, bus: Bus, context: Context, dtype: str = "float32") -> None:
        self._bus = bus
        self._full = 0
        self.weights = Copies(dtype)
        place = StorePlace(context.files.weights.absolute(), ChunkLog(bus, WEIGHTS_STORED))
        store = store_kind(context.config.weights.store).open(place)
        self._publisher = Publisher(self.weights, store=store, checkpoints=Path(), run=bus.run)
        self._key = ""
        self._version = -1

    async def publish(self, *, full: bool = False, again: bool = False) -> WeightsPublished:
        """Store the next version, or the newest once more; it is not announced yet."""
        full, self._version = full or again, self._version + (not again)
        self._publisher.copy_weights()
        message = await asyncio.to_thread(
            self._publisher.publish, lineage=0, version=self._version, base="" if full else self._key
        )
        self._key = message.key
        return message

    async def announce(self, message: WeightsPublished, *, answers: int = 0) -> int:
        """Publish a version, with the place of the full one that it needs; returns its sequence."""
        message.full, message.answers = self._full if message.base else 0, answers
        sequence = await publish(self._bus, message, headers={WRITER: "learner"})
        self._full = self._full if message.base else sequence
        return sequence


class Answers:
    """All that engines publish."""

    def __init__(self, bus: Bus) -> None:
        self.messages: list[Any] = []
        self._reader = LogReader(bus, ENGINES, self._on_record)

    async def __aenter__(self) -> "Answers":
        await self._reader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._reader.close()

    def ready(self, engine_id: str = "engine-1") -> list[int]:
        """Versions that an engine confirmed."""
        found = [message for message in self.messages if isinstance(message, EngineReady)]
        return [message.version for message in found if message.engine_id == engine_id]

    def refused(self) -> list[WeightsRefused]:
        """Refusals."""
        return [message for message in self.messages if isinstance(message, WeightsRefused)]

    def _on_record(self, record: Record) -> None:
        topic = BUILT_IN.topic_of(record.subject)
        assert topic is not None
        self.messages.append(decode(topic.message, record.data))
