"""A rank of the learner: one trainer, the rows it fetches, and the calls that the learner makes to it.

To a rank that is a process calls travel as length-prefixed MessagePack over a local socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from actors.learner.payloads import fetch_trajectories
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import BatchStats, GradedGroup, build_rows
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.bus.chunks import ChunkWriter
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from asyncrl.training.checkpoint import Checkpoint, CheckpointError
from asyncrl.training.protocol import NonFiniteLoss, NonFiniteWeights, RowError, Trainer
from asyncrl.training.publisher import Publisher
from asyncrl.training.ranks import join_ranks
from asyncrl.training.trainers import open_trainer
from asyncrl.weights.store import STORES, StorePlace
from topics.batches import BatchPacked
from topics.topic import BATCHES
from topics.trajectories import TrajectoryGenerated
from topics.weights import WEIGHTS_STORED, WeightsPublished
from topics.wire import WireError, prepare

T = TypeVar("T")


class StepResult(NamedTuple):
    """The result of a step."""

    stats: BatchStats
    metrics: dict[str, float]


class Rank:
    """A trainer in this process, alone or with peers. What takes long is done in threads."""

    def __init__(
        self, bus: Bus, config: Config, files: RunFiles, *, rank: int = 0, ranks: int = 1, rendezvous: Path = Path()
    ) -> None:
        """
        Args:
            rank: number of this one among its peers.
            ranks: how many there are.
            rendezvous: see `join_ranks`.
        """
        prepare(TrajectoryGenerated)
        self._bus = bus
        self._config = config
        self._files = files
        self._place = StorePlace(files.weights, ChunkWriter(bus, WEIGHTS_STORED))
        self._rank, self._ranks, self._rendezvous = rank, ranks, rendezvous
        self._fetches: dict[int, asyncio.Task[tuple[BatchPacked, list[GradedGroup]]]] = {}  # by sequence of the batch
        self.trainer: Trainer
        self.publisher: Publisher

    async def open(self) -> None:
        """See `TrainerGroup.open`."""
        await self.do(Open())

    async def do(self, call: Call[T]) -> T:
        """See `TrainerGroup.do`."""
        return await call.run(self)

    def check(self) -> None:
        """See `TrainerGroup.check`: nothing ends it."""

    async def close(self) -> None:
        """See `TrainerGroup.close`."""

    def open_trainer(self) -> None:
        """Load the model as it was before the run."""
        if self._ranks > 1:
            join_ranks(self._rendezvous, self._rank, self._ranks, self._config.learner.device)
        self.trainer = open_trainer(self._config, self._files.model_path(self._config.model))
        weights = self._config.weights
        store, run = STORES[weights.store](self._place), "" if weights.delta == "never" else self._config.run
        self.publisher = Publisher(self.trainer, store=store, checkpoints=self._files.checkpoints, run=run)

    def fetch(self, sequence: int) -> asyncio.Task[tuple[BatchPacked, list[GradedGroup]]]:
        """Fetch a batch and its rows, unless that has begun."""
        if sequence not in self._fetches:
            self._fetches[sequence] = asyncio.create_task(self._fetch(sequence))
            self._fetches[sequence].add_done_callback(_noted)
        return self._fetches[sequence]

    async def _fetch(self, sequence: int) -> tuple[BatchPacked, list[GradedGroup]]:
        packed = await read_batch(self._bus, sequence)
        return packed, await fetch_trajectories(self._bus, packed, self._rank, self._ranks)

    async def fetched(self, sequence: int) -> tuple[BatchPacked, list[GradedGroup]]:
        """A batch and its rows, once: they are large."""
        task = self.fetch(sequence)
        del self._fetches[sequence]
        return await task


def _noted(task: asyncio.Task[Any]) -> None:
    """Take note of a fault: the step whose rows these are may never come."""
    if not task.cancelled():
        task.exception()


async def read_batch(bus: Bus, sequence: int) -> BatchPacked:
    """Read a batch by its sequence in the batch log.

    Raises:
        ActorFault: it is gone, or cannot be read.
    """
    record = await read_message(bus, BATCHES, sequence)
    if record is None:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch, is gone")
    try:
        return await read(bus, BatchPacked, record)
    except (BlobMissing, WireError) as error:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch: {error}") from error


class Call(msgspec.Struct, Generic[T], array_like=True, tag=True):
    """A call to a rank, as it travels to ranks that are processes.

    Calls come one after the other, but for those `beside` others: what these write was copied away before.
    """

    answer: ClassVar[Any] = None  # type of the result
    every_rank: ClassVar[bool] = True  # else the first one alone, which has what the others copied away
    beside: ClassVar[bool] = False

    async def run(self, rank: Rank) -> T:
        """Do it: in a thread, as all that takes long."""
        return await asyncio.to_thread(self._compute, rank)

    def _compute(self, rank: Rank) -> T:
        raise NotImplementedError

    def merged(self, results: Sequence[T]) -> T:
        """Return the result from those of the ranks that were called."""
        return results[0]


class Open(Call[None]):
    """Load the model as it was before the run."""

    def _compute(self, rank: Rank) -> None:
        rank.open_trainer()


class Load(Call[None]):
    """Go on from a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or belongs to another model.
    """

    checkpoint: str  # its directory

    def _compute(self, rank: Rank) -> None:
        rank.trainer.load(Path(self.checkpoint))


class Fetch(Call[None]):
    """Begin to fetch the rows of a batch that will be trained soon."""

    beside = True
    batch: int  # sequence in the batch log

    async def run(self, rank: Rank) -> None:
        """See `Call`."""
        rank.fetch(self.batch)


class Step(Call[StepResult]):
    """Make one update.

    Raises:
        ActorFault: tokens are gone, or are not those that were graded.
        AlgorithmError, NonFiniteLoss, RowError: the batch cannot be trained on; the weights are as before.
    """

    answer = StepResult
    batch: int  # sequence in the batch log

    async def run(self, rank: Rank) -> StepResult:
        """See `Call`."""
        packed, groups = await rank.fetched(self.batch)

        def update() -> StepResult:
            rows, stats = build_rows(groups, packed.objective, step=packed.step, min_version=packed.min_version)
            return StepResult(stats, rank.trainer.step(rows, packed.objective))

        return await asyncio.to_thread(update)

    def merged(self, results: Sequence[StepResult]) -> StepResult:
        """See `Call`: each rank had its own rows."""
        first, lags = results[0], Counter[int]()
        for result in results:
            lags.update(result.stats.lag_histogram)
        stats = dataclasses.replace(
            first.stats,
            tokens_trained=sum(result.stats.tokens_trained for result in results),
            tokens_stale=sum(result.stats.tokens_stale for result in results),
            lag_histogram=dict(sorted(lags.items())),
        )
        counts = [name for name in ("rows", "rows_skipped") if name in first.metrics]
        sums = {name: sum(result.metrics[name] for result in results) for name in counts}
        return StepResult(stats, first.metrics | sums)


class CopyWeights(Call[None]):
    """Copy the weights away, for `Digest`, `Publish` and `Export`; what was copied before must be written."""

    def _compute(self, rank: Rank) -> None:
        rank.publisher.copy_weights()


class CopyState(Call[None]):
    """Copy weights and optimiser away, for `Save`; what was copied before must be written."""

    def _compute(self, rank: Rank) -> None:
        rank.publisher.copy_state()


class Digest(Call[str]):
    """Return the identity of the copied weights."""

    answer, every_rank = str, False

    def _compute(self, rank: Rank) -> str:
        return rank.publisher.digest()


class Publish(Call[WeightsPublished]):
    """Write the copied weights into the weight store.

    Raises:
        NonFiniteWeights: a tensor holds values that are not finite.
        CheckpointError: the disk refused it; nothing is left behind.
    """

    answer, every_rank, beside = WeightsPublished, False, True
    lineage: int
    version: int
    base: str = ""  # see `Publisher.publish`

    def _compute(self, rank: Rank) -> WeightsPublished:
        return rank.publisher.publish(lineage=self.lineage, version=self.version, base=self.base)


class Save(Call[str]):
    """Write the copied state as a checkpoint, and read it back; returns its directory.

    Raises:
        CheckpointError: the disk refused it; nothing is left behind.
    """

    answer, every_rank, beside = str, False, True
    checkpoint: Checkpoint

    def _compute(self, rank: Rank) -> str:
        return str(rank.publisher.save(self.checkpoint))


class Export(Call[None]):
    """Write the copied weights as a model; one that is there is replaced.

    Raises:
        CheckpointError: the disk refused it; nothing is left behind.
    """

    every_rank = False
    directory: str

    def _compute(self, rank: Rank) -> None:
        rank.publisher.export(Path(self.directory))


AnyCall: TypeAlias = Open | Load | Fetch | Step | CopyWeights | CopyState | Digest | Publish | Save | Export
BEAT_S = 1.0  # seconds between two heartbeats
ERRORS: dict[str, type[AsyncRLError]] = {
    error.__name__: error
    for error in (ActorFault, AlgorithmError, CheckpointError, NonFiniteLoss, NonFiniteWeights, RowError)
}
"""Errors that a rank reports and survives; any other ends it."""


class NumberedCall(msgspec.Struct, array_like=True):
    """A call to a rank."""

    number: int
    call: AnyCall


class Reply(msgspec.Struct, array_like=True):
    """The answer of a rank to a call; without a number a heartbeat, as which the first one names the rank."""

    rank: int
    number: int | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""  # name of a class in `ERRORS`
    reason: str = ""
