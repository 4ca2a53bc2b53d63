"""The computing part of the learner: one trainer, the rows it fetches, and the copies of its weights that it writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple, Protocol

from actors.learner.payloads import Payloads
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import BatchStats, build_rows
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.config.settings import Config
from asyncrl.run.directory import RunFiles
from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.protocol import Trainer
from asyncrl.training.publisher import Publisher
from asyncrl.training.ranks import join_ranks
from asyncrl.training.trainers import open_trainer
from topics.batches import BatchPacked
from topics.topic import BATCHES
from topics.weights import WeightsPublished
from topics.wire import WireError


class Batch(NamedTuple):
    """A batch, and where it lies."""

    packed: BatchPacked
    sequence: int  # in the batch log


class StepResult(NamedTuple):
    """The result of a step."""

    stats: BatchStats
    metrics: dict[str, float]


class TrainerGroup(Protocol):
    """The trainer of a learner: one or several ranks, which live and die as one.

    Calls come one after the other, but for `fetch`, and for `publish` and `save`, which are awaited beside the steps
    that follow: what they write was copied away before.
    """

    async def open(self) -> None:
        """Start, with the model as it was before the run."""
        ...

    async def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it cannot be read, or belongs to another model.
        """
        ...

    async def fetch(self, batch: Batch) -> None:
        """Begin to fetch the rows of a batch that will be trained soon."""
        ...

    async def step(self, batch: Batch) -> StepResult:
        """Make one update.

        Raises:
            ActorFault: tokens are gone, or are not those that were graded.
            AlgorithmError, NonFiniteLoss, RowError: the batch cannot be trained on; the weights are as before.
        """
        ...

    async def copy_weights(self) -> None:
        """Copy the weights away, for `digest`, `publish` and `export`; what was copied before must be written."""
        ...

    async def copy_state(self) -> None:
        """Copy weights and optimiser away, for `save`; what was copied before must be written."""
        ...

    async def digest(self) -> str:
        """Return the identity of the copied weights."""
        ...

    async def publish(self, *, lineage: int, version: int) -> WeightsPublished:
        """Write the copied weights into the weight store.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        ...

    async def save(self, checkpoint: Checkpoint) -> Path:
        """Write the copied state as a checkpoint, and read it back; returns its directory.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        ...

    async def export(self, directory: Path) -> None:
        """Write the copied weights as a model; one that is there is replaced.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        ...

    def check(self) -> None:
        """Raise what ended the group, if anything did."""
        ...

    async def close(self) -> None:
        """End all ranks, for good."""
        ...


class Rank:
    """See `TrainerGroup`: a trainer in this process, alone or with peers. What takes long is done in threads."""

    def __init__(
        self, bus: Bus, config: Config, files: RunFiles, *, rank: int = 0, ranks: int = 1, rendezvous: Path = Path()
    ) -> None:
        """
        Args:
            rank: number of this one among its peers.
            ranks: how many there are.
            rendezvous: see `join_ranks`.
        """
        self._config = config
        self._files = files
        self._rank, self._ranks, self._rendezvous = rank, ranks, rendezvous
        self._payloads = Payloads(bus, rank, ranks)
        self._trainer: Trainer
        self._publisher: Publisher

    async def open(self) -> None:
        """See `TrainerGroup.open`."""
        self._trainer = await asyncio.to_thread(self._open)
        self._publisher = Publisher(self._trainer, weights=self._files.weights, checkpoints=self._files.checkpoints)

    def _open(self) -> Trainer:
        if self._ranks > 1:
            join_ranks(self._rendezvous, self._rank, self._ranks, self._config.learner.device)
        return open_trainer(self._config, self._files.model_path(self._config))

    async def load(self, checkpoint: Path) -> None:
        """See `TrainerGroup.load`."""
        await asyncio.to_thread(self._trainer.load, checkpoint)

    async def fetch(self, batch: Batch) -> None:
        """See `TrainerGroup.fetch`."""
        self._payloads.begin(batch.packed)

    async def step(self, batch: Batch) -> StepResult:
        """See `TrainerGroup.step`."""
        packed = batch.packed
        groups = await self._payloads.take(packed)

        def update() -> StepResult:
            rows, stats = build_rows(groups, packed.objective, step=packed.step, min_version=packed.min_version)
            return StepResult(stats, self._trainer.step(rows, packed.objective))

        return await asyncio.to_thread(update)

    async def copy_weights(self) -> None:
        """See `TrainerGroup.copy_weights`."""
        await asyncio.to_thread(self._publisher.copy_weights)

    async def copy_state(self) -> None:
        """See `TrainerGroup.copy_state`."""
        await asyncio.to_thread(self._publisher.copy_state)

    async def digest(self) -> str:
        """See `TrainerGroup.digest`."""
        return await asyncio.to_thread(self._publisher.digest)

    async def publish(self, *, lineage: int, version: int) -> WeightsPublished:
        """See `TrainerGroup.publish`."""
        return await asyncio.to_thread(self._publisher.publish, lineage=lineage, version=version)

    async def save(self, checkpoint: Checkpoint) -> Path:
        """See `TrainerGroup.save`."""
        return await asyncio.to_thread(self._publisher.save, checkpoint)

    async def export(self, directory: Path) -> None:
        """See `TrainerGroup.export`."""
        await asyncio.to_thread(self._publisher.export, directory)

    def check(self) -> None:
        """See `TrainerGroup.check`: nothing ends it."""

    async def close(self) -> None:
        """See `TrainerGroup.close`."""


async def read_batch(bus: Bus, sequence: int) -> Batch:
    """Read a batch by its sequence in the batch log.

    Raises:
        ActorFault: it is gone, or cannot be read.
    """
    record = await read_message(bus, BATCHES, sequence)
    if record is None:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch, is gone")
    try:
        return Batch(await read(bus, BatchPacked, record), sequence)
    except (BlobMissing, WireError) as error:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch: {error}") from error
