"""Background work of the learner: messages to its log, in their order, and the tasks that they wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from actors.learner.group import TrainerGroup
from actors.learner.publication import publish_version, rest
from actors.learner.rank import StepResult
from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from asyncrl.background import BackgroundTasks
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.training.publisher import Publisher
from topics.batches import BatchPacked, BatchTrained
from topics.weights import WeightsPublished, WeightsUnchanged
from topics.wire import Message

T = TypeVar("T")


class Outbox:
    """Appends messages one after the other in background tasks; `check` raises the first fault."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._newest: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks(self._on_fault)
        self._fault: BaseException | None = None

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin some work in the background."""
        task = self._tasks.start(work)
        task.add_done_callback(lambda _: self._keeper.wake())  # what waits for a batch looks
        return task

    def put(self, *messages: Message | Awaitable[Message]) -> None:
        """Append messages after all that were put before; a message waits until the earlier ones are made."""
        for message in messages:
            self._newest = self.begin(self._store(self._newest, message))

    def check(self) -> None:
        """Raise the first fault of a background task."""
        if self._fault is not None:
            raise self._fault

    async def stored(self) -> None:
        """Wait until everything put so far is on the log and read back."""
        if self._newest is not None:
            await asyncio.shield(self._newest)

    async def ended(self) -> None:
        """Wait until all background tasks have ended, with or without a fault."""
        await self._tasks.ended()

    async def _store(self, before: asyncio.Task[None] | None, making: Message | Awaitable[Message]) -> None:
        try:
            message = making if isinstance(making, Message) else await making
        finally:
            if before is not None:
                await before
        await self._keeper.append_until_stored([message])

    def _on_fault(self, error: BaseException) -> None:
        self._fault = self._fault or error


def step_record(packed: BatchPacked, result: StepResult, sequence: int, *, lineage: int, skipped: bool) -> BatchTrained:
    """Return the record of a step, with the sequence of its batch in the batch log."""
    stats = result.stats
    return BatchTrained(
        step=packed.step,
        lineage=lineage,
        stage=packed.stage,
        metrics=result.metrics,
        lags={-1: stats.tokens_trained} if packed.stage == "warmup" else stats.lag_histogram,
        masked=stats.tokens_stale,
        rewards=[stats.reward_mean, stats.reward_std],
        trajectories=stats.trajectories,
        batch_sequence=sequence,
        skipped=skipped,
        anomaly=result.anomaly,
    )


class Version(NamedTuple):
    """A version that a trainer group is to write: see `publish_version`."""

    lineage: int
    number: int
    base: str
    why: str


async def published_by(group: TrainerGroup, version: Version, before: WeightsPublished | None) -> WeightsPublished:
    """Have a group write a version; one with the weights of the version before is announced as that one is stored.

    Args:
        before: the newest that the group wrote; None where another must be written in any case.

    Raises:
        NonFiniteWeights, CheckpointError: as `publish_version`.
    """
    has_tensors = before is not None and (before.base or before.bytes)  # else its trainer is a scripted one
    if before is None or not has_tensors or not all(await group.ask(Publisher.unchanged)):
        return await publish_version(group, *version)
    base, choice = before.base if before.is_unchanged else before.key, f"unchanged since {before.key}"
    lineage, number = version.lineage, version.number
    found = WeightsPublished(lineage, number, before.digest, before.store, before.location, base, adapts=before.adapts)
    return msgspec.structs.replace(found, choice=choice)


async def report_unchanged(
    context: Context, keeper: Keeper, message: WeightsPublished, before: WeightsPublished
) -> None:
    """Report that the steps since the version before changed no weight; a trainer without a model never changes any."""
    if trainer_kind(context.config.learner.trainer).can(TrainerCapability.MODEL):
        context.count("unchanged_versions")
        context.log.error("weights unchanged", version=message.version, base=before.key)
        await keeper.append_until_stored([WeightsUnchanged(message.lineage, message.version, before.key)])


async def offload(context: Context, group: TrainerGroup) -> None:
    """Move weights and optimiser to host memory until the next batch."""
    began, found = time.monotonic(), await rest(group)
    context.log.info("trainer offloaded", seconds=round(time.monotonic() - began, 6), **found._asdict())
