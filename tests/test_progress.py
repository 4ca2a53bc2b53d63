"""The progress of trajectories on a rollout worker: stored or a fault of the worker, and continued without gaps."""

import asyncio
from collections.abc import Callable

import pytest
from conftest import Connect, Stage

from actors.progress_log import ProgressLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from topics.topic import BLOBS
from topics.trajectories import Answer, ProgressEntry


class OneAnswer:
    """A trajectory's progress with one large answer."""

    def entry(self) -> ProgressEntry:
        answer = Answer("tool:look", "", result=bytes(200))
        return ProgressEntry(trajectory_id="p000000-0", offset=0, journal={"0": answer})

    def stored(self, entry: ProgressEntry) -> None:
        """Nothing follows from it."""


class Unreadable(OneAnswer):
    """A trajectory whose progress cannot be told."""

    def entry(self) -> ProgressEntry:
        raise LookupError("no such call")


async def test_progress_whose_chunks_cannot_be_stored_ends_the_worker_with_that_error(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.bus.talk.INLINE_BYTES", 100)
    await bus.api(f"STREAM.DELETE.{BLOBS.full_name(bus.run)}")
    context = stage().context("rollout", await connect(bus.run, publish_deadline_s=0.5))

    with pytest.raises(BusError, match="blob.stored"):
        await ProgressLog(context).store(OneAnswer())

    assert context.stop.is_set()
    assert isinstance(context.faults[0], BusError)
    assert "blob.stored" in str(context.faults[0])


async def test_progress_that_cannot_be_told_ends_the_worker_and_nobody_waits_for_it(
    bus: Bus, stage: Callable[..., Stage]
):
    context = stage().context("rollout", bus)
    log = ProgressLog(context)

    found = await asyncio.gather(log.store(OneAnswer()), log.store(Unreadable()), return_exceptions=True)

    assert [str(error) for error in found] == ["no such call"] * 2
    assert [str(fault) for fault in context.faults] == ["no such call"]
    assert context.stop.is_set()
