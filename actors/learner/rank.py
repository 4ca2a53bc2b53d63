"""A rank of the learner: one trainer, the rows it fetches, and the calls by which the learner trains.

Those by which it publishes are in `actors/learner/publication.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from actors.learner.fetching import fetch_trajectories, read_batch
from asyncrl.algorithms.balance import Work
from asyncrl.algorithms.batches import BatchStats, GradedGroup, build_rows
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.config.settings import Config
from asyncrl.config.trainers import trainer_kind
from asyncrl.config.weights_settings import store_kind
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from asyncrl.training.anomalies import Usual
from asyncrl.training.megatron.parallel_config import layout_of
from asyncrl.training.objective import objective_of
from asyncrl.training.protocol import Offloaded, Trainer
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

T = TypeVar("T")

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
        self.take_gpu = partial(take_gpu, config.learner.device, rank, ranks)
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
        await self.do(Open())

    async def do(self, call: Call[T]) -> T:

        async def ask(one: Call[Any]) -> list[Any]:
            return [await one.run(self)]

        return await carried_out(call, ask)

    def check(self) -> None:
        """See `TrainerGroup.check`: nothing ends it."""

    async def close(self) -> None:
        for task in self._fetches.values():
            task.cancel()
        if self._teacher is not None:
            await self._teacher.close()

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


class Call(msgspec.Struct, Generic[T], array_like=True, tag=True):
    """A call to a rank, as it travels to ranks that are processes.

    Calls run one after the other. Only a call with `concurrent` set may run together with others: it uses copied data.
    """

    answer: ClassVar[Any] = None  # type of what a rank answers
    every_rank: ClassVar[bool] = True  # else the first one alone
    concurrent: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False  # it uses the memory of the trainer's device
    undone: ClassVar[Call[None] | None] = None  # the call that removes what ranks did, where another one could not

    async def run(self, rank: Rank) -> Any:
        """Do it: in a thread, as all that takes long."""
        return await asyncio.to_thread(self._compute, rank)

    def _compute(self, rank: Rank) -> Any:
        raise NotImplementedError

    def merged(self, answers: Sequence[Any]) -> T:
        """Return the result from the answers of the called ranks, if no call follows."""
        result: T = answers[0]
        return result

    def following(self, answers: Sequence[Any]) -> Call[T] | None:
        """Return the call that is made once all ranks have answered, whose result is that of this one."""
        return None


async def carried_out(call: Call[T], ask: Callable[[Call[Any]], Awaitable[list[Any]]]) -> T:
    """Make a call and those that follow it; returns the result.

    Args:
        ask: makes one call, and returns the answers of the ranks. Of a call that can be undone it waits for all.
    """
    while True:
        try:
            answers = await ask(call)
        except AsyncRLError:
            if call.undone:
                with contextlib.suppress(AsyncRLError):  # the first one says more
                    await ask(call.undone)
            raise
        following = call.following(answers)
        if following is None:
            return call.merged(answers)
        call = following


class Open(Call[None]):
    """Load the model as it was before the run."""

    on_gpu = True

    def _compute(self, rank: Rank) -> None:
        rank.open_trainer()


class Load(Call[None]):
    """Continue from a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
        OtherModel: it belongs to another model.
    """

    on_gpu = True
    checkpoint: str  # its directory

    def _compute(self, rank: Rank) -> None:
        rank.trainer.load(Path(self.checkpoint))


class Fetch(Call[None]):
    """Begin to fetch the rows of a batch that will be trained soon."""

    concurrent = True
    batch: int  # sequence in the batch log

    async def run(self, rank: Rank) -> None:
        rank.fetch(self.batch)


class Gather(Call[None]):
    """Wait until the rows of a batch are fetched, with what a teacher that is a server has to say.

    Raises:
        ActorFault, RowError: as `Step`.
    """

    concurrent = True
    batch: int  # sequence in the batch log

    async def run(self, rank: Rank) -> None:
        await rank.fetch(self.batch)


class Step(Call[StepResult]):
    """Make one update.

    Raises:
        ActorFault: tokens are gone, or are not those that were graded.
        AlgorithmError, NonFiniteLoss, RowError: the batch cannot be trained on; the weights are as before.
    """

    answer, on_gpu = StepResult, True
    batch: int  # sequence in the batch log
    usual: Usual | None = None  # see `Trainer.step`
    profile: str = ""  # path of its trace, without the number of the rank; "": none

    async def run(self, rank: Rank) -> StepResult:
        packed, groups = await rank.fetched(self.batch)

        def update() -> StepResult:
            rows, stats = build_rows(groups, packed.objective, step=packed.step, min_version=packed.min_version)
            with step_profile(self.profile and f"{self.profile}-rank{rank.number}.json"):
                metrics = rank.trainer.step(rows, packed.objective, self.usual)
            result = StepResult(stats, metrics, rank.trainer.anomaly)
            return result if rank.counts else result.uncounted()

        return await asyncio.to_thread(update)

    def merged(self, results: Sequence[StepResult]) -> StepResult:
        """See `Call`: each replica had its own rows."""
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


class Rest(Call[Offloaded]):
    """Give the device's memory back until the next step or copy."""

    answer = Offloaded

    def _compute(self, rank: Rank) -> Offloaded:
        return rank.trainer.rest()

    def merged(self, answers: Sequence[Offloaded]) -> Offloaded:
        """See `Call`: the bytes of all ranks, and the seconds of the slowest of them."""
        size, wait_s, copy_s, free_s, copied, left = zip(*answers, strict=True)
        return Offloaded(sum(size), max(wait_s), max(copy_s), max(free_s), sum(copied), sum(left))


Training: TypeAlias = Open | Load | Fetch | Gather | Step | Rest
"""Any of these calls."""
