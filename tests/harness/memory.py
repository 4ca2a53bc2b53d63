"""A learner's memory: versions that are in the store, announced, and offered to engines as the learner does."""

import asyncio
from pathlib import Path

import torch

from actors.learner.weight_handles import Offers
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files.store import FileStore
from topics.weights import WeightsPublished


class Memory:
    """Publishes version after version; each has other weights."""

    def __init__(self, bus: Bus, context: Context, model: Path) -> None:
        self.context = context
        self.version = -1
        self.offers = Offers(context, self._share)
        self._bus = bus
        self._trainer = TorchTrainer(model, TorchSettings(shares=True))
        store = FileStore(context.files.weights.absolute())
        self._publisher = Publisher(self._trainer, store=store, checkpoints=Path())
        self.spoil = False  # the next version in memory is another one than in the store

    async def __aenter__(self) -> "Memory":
        await self.offers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.offers.close()

    async def publish(self) -> WeightsPublished:
        """Copy other weights away, store them, offer and announce them."""
        self.version += 1
        with torch.no_grad():
            for parameter in self._trainer._policy.model.parameters():
                parameter.mul_(1.01)
        await self.offers.withdraw()
        await asyncio.to_thread(self._publisher.copy_weights)
        message = await asyncio.to_thread(self._publisher.publish, lineage=0, version=self.version)
        if self.spoil:
            self._publisher._weights.files()["model"][0].content[:2] ^= 1
        self.offers.open(message.key)
        await publish(self._bus, message, headers={WRITER: "learner"})
        return message

    async def _share(self) -> list[list[bytes]]:
        return [await asyncio.to_thread(self._publisher.shared)]
