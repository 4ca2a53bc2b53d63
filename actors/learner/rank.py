"""A rank of the learner: one trainer, the rows it fetches, and what it publishes."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actors.learner.fetching import fetch_trajectories, read_batch
from asyncrl.algorithms.balance import Work
from asyncrl.algorithms.batches import BatchStats, GradedGroup, build_rows
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.config.settings import Config
from asyncrl.config.trainers import trainer_kind
from asyncrl.config.weights_settings import store_kind
from asyncrl.run.directory import RunFiles
from asyncrl.training.anomalies import Usual
from asyncrl.training.megatron.parallel_config import layout_of
from asyncrl.training.objective import objective_of
from asyncrl.training.protocol import Trainer
from asyncrl.training.publisher import Member, Publisher
from asyncrl.training.ranks import join_ranks, limit_memory, named_where_full, shares, take_gpu, work_of
from asyncrl.training.step_profile import step_profile
from asyncrl.weights.store import StorePlace
from topics.batches import Anomaly, BatchPacked
from topics.trajectories import TrajectoryGenerated
from topics.weights import WEIGHTS_STORED
from topics.wire import prepare

if TYPE_CHECKING:
    from actors.learner.teacher import TeacherServer

_ROWS = ("rows", "rows_skipped")  # figures that are counts


class StepResult(NamedTuple):
    """The result of a step."""

    stats: BatchStats
    metrics: dict[str, float]
    anomaly: Anomaly | None = None

    def uncounted(self) -> StepResult:
        """Return it without the rows, which another rank of the replica counts."""
        stats = dataclasses.replace(self.stats, tokens_trained=0, tokens_stale=0, lag_histogram={})
        return StepResult(stats, self.metrics | dict.fromkeys(_ROWS, 0.0), self.anomaly)

    @staticmethod
    def merged(results: Sequence[StepResult]) -> StepResult:
        """Return the result of all ranks: each replica had its own rows."""
        first, lags = results[0], Counter[int]()
        for result in results:
            lags.update(result.stats.lag_histogram)
        stats = dataclasses.replace(
            first.stats,
            tokens_trained=sum(result.stats.tokens_trained for result in results),
            tokens_stale=sum(result.stats.tokens_stale for result in results),
            lag_histogram=dict(sorted(lags.items())),
        )
        counts = [name for name in _ROWS if name in first.metrics]
        sums = {name: sum(result.metrics[name] for result in results) for name in counts}
        return StepResult(stats, first.metrics | sums, first.anomaly)


class Rank:
    """See `TrainerGroup`: a trainer in this process, alone or with peers. What takes long is done in threads."""

    can_grow = False

    def __init__(
        self, bus: Bus, config: Config, files: RunFiles, *, rank: int = 0, ranks: int = 1, rendezvous: Path = Path()
    ) -> None:
        prepare(TrajectoryGenerated)
        self._bus = bus
        self._config = config
        self._files = files
        self._place = StorePlace(files.weights, ChunkLog(bus, WEIGHTS_STORED))
        self.number, self._ranks, self._rendezvous = rank, ranks, rendezvous  # see `join_ranks`
        layout = layout_of(config.learner)
        self._replica, self._replicas = layout.replica(rank, ranks), ranks // layout.model
        self._part = layout.place(rank, ranks) if config.learner.routing == "replay" else None
        self.counts = layout.is_first(rank, ranks)  # the rows of its replica
        self._fetches: dict[int, asyncio.Task[tuple[BatchPacked, list[GradedGroup]]]] = {}  # by sequence of the batch
        self._teacher = _teacher_of(config, files)
        self._work: Work | None = None  # of the model, where several ranks share rows
        self.trainer: Trainer
        self.publisher: Publisher

    async def open(self) -> None:
        await self.call(Rank.open_trainer)

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [await self.call(method, *arguments)]

    async def ask_first(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await self.call(method, *arguments)

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the rank, its `publisher` or its `trainer`: in a thread, unless it is a coroutine."""
        owner, name = method.__qualname__.split(".")
        bound = getattr(self if owner == "Rank" else getattr(self, owner.lower()), name)
        if inspect.iscoroutinefunction(bound):
            return await bound(*arguments)
        return await asyncio.to_thread(bound, *arguments)

    def check(self) -> None:
        """See `TrainerGroup.check`: nothing ends it."""

    async def close(self) -> None:
        for task in self._fetches.values():
            task.cancel()
        if self._teacher is not None:
            await self._teacher.close()

    def take_gpu(self) -> None:
        """Take the GPU, before anything waits for another rank.

        Raises:
            NoGpu, GpuFull: it cannot be used.
        """
        take_gpu(self._config.learner.device, self.number, self._ranks)

    def open_trainer(self) -> None:
        """Load the model as it was before the run."""
        model = self._files.model_path(self._config.model)
        if self._ranks > 1:
            join_ranks(self._rendezvous, self.number, self._ranks, self._config.learner.device)
            self._work = work_of(model) if self._replicas > 1 else None
        if self._config.placement.colocate == "memory":
            limit_memory(self._config.learner.device, self._config.placement.learner_fraction)
        with named_where_full(self.number):
            kind = trainer_kind(self._config.learner.trainer)
            self.trainer = kind.open(self._config, model, self._files.base)
            self.trainer.compile_for(objective_of(self._config, 1))
        weights = self._config.weights
        store, run = store_kind(weights.store).open(self._place), "" if weights.delta == "never" else self._config.run
        member = Member(self.number, self._ranks)
        self.publisher = Publisher(
            self.trainer, store=store, checkpoints=self._files.checkpoints, run=run, member=member
        )

    async def gather(self, batch: int, wait: bool) -> None:
        """Begin to fetch the rows of a batch that will be trained soon.

        Args:
            batch: its sequence in the batch log.
            wait: until they are fetched, with what a teacher that is a server has to say.

        Raises:
            ActorFault, RowError: as `step`.
        """
        fetching = self.fetch(batch)
        if wait:
            await fetching

    async def step(self, batch: int, usual: Usual | None, profile: str) -> StepResult:
        """Make one update.

        Args:
            batch: its sequence in the batch log.
            usual: see `Trainer.step`.
            profile: path of its trace, without the number of the rank; "": none.

        Raises:
            ActorFault: tokens are gone, or are not those that were graded.
            AlgorithmError, NonFiniteLoss, RowError: the batch cannot be trained on; the weights are as before.
        """
        packed, groups = await self.fetched(batch)

        def update() -> StepResult:
            rows, stats = build_rows(groups, packed.objective, step=packed.step, min_version=packed.min_version)
            with step_profile(profile and f"{profile}-rank{self.number}.json"):
                metrics = self.trainer.step(rows, packed.objective, usual)
            result = StepResult(stats, metrics, self.trainer.anomaly)
            return result if self.counts else result.uncounted()

        return await asyncio.to_thread(update)

    def fetch(self, sequence: int) -> asyncio.Task[tuple[BatchPacked, list[GradedGroup]]]:
        """Fetch a batch and its rows, unless that has begun."""
        if sequence not in self._fetches:
            self._fetches[sequence] = asyncio.create_task(self._fetch(sequence))
            self._fetches[sequence].add_done_callback(_noted)
        return self._fetches[sequence]

    async def _fetch(self, sequence: int) -> tuple[BatchPacked, list[GradedGroup]]:
        packed = await read_batch(self._bus, sequence)
        whole = self._config.learner.share_prefixes
        owners = shares(packed, self._work, self._replicas, whole_groups=whole) if self._work else None
        groups = await fetch_trajectories(self._bus, packed, self._replica, owners, self._part)
        return packed, groups if self._teacher is None else await self._teacher.fill(packed.objective, groups)

    async def fetched(self, sequence: int) -> tuple[BatchPacked, list[GradedGroup]]:
        """A batch and its rows, once: they are large."""
        task = self.fetch(sequence)
        del self._fetches[sequence]
        return await task


def _teacher_of(config: Config, files: RunFiles) -> TeacherServer | None:
    if not config.learner.teacher.url:
        return None
    from actors.learner.teacher import TeacherServer  # loads an HTTP client

    return TeacherServer(config, files)


def _noted(task: asyncio.Task[Any]) -> None:
    """Take note of a fault: the step whose rows these are may never come."""
    if not task.cancelled():
        task.exception()
