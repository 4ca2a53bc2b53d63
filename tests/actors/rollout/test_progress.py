"""The progress of trajectories on a rollout worker: stored or a fault of the worker, and continued without gaps."""

import asyncio
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from actors.rollout.progress import Progress
from actors.rollout.progress_log import ProgressLog, ProgressReader
from actors.runtime.delivery import Delivery
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_next
from asyncrl.bus.pull import Position
from harness.stage import Connect, Stage
from topics.prompts import PromptIssued, PromptRow
from topics.topic import BLOBS, PROMPTS, TRAJECTORIES
from topics.trajectories import PROGRESS_STORED, Answer, ProgressEntry


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
    monkeypatch.setattr("asyncrl.bus.publish.INLINE_BYTES", 100)
    await bus.api(f"STREAM.DELETE.{BLOBS.full_name(bus.run)}")
    context = stage().context("rollout", await connect(bus.run, publish_deadline_s=0.5))

    with pytest.raises(BusError, match=r"blob\.stored"):
        await ProgressLog(context).store(OneAnswer())

    assert context.stop.is_set()
    assert isinstance(context.faults[0], BusError)
    assert "blob.stored" in str(context.faults[0])


async def test_progress_that_cannot_be_published_ends_the_worker_and_nobody_waits_for_it(
    bus: Bus, stage: Callable[..., Stage]
):
    context = stage().context("rollout", bus)
    log = ProgressLog(context)

    found = await asyncio.gather(log.store(OneAnswer()), log.store(Unreadable()), return_exceptions=True)

    assert [str(error) for error in found] == ["no such call"] * 2
    assert [str(fault) for fault in context.faults] == ["no such call"]
    assert context.stop.is_set()


class Rollout:
    """The deliveries of one trajectory to workers, and what each stores of it."""

    def __init__(self, bus: Bus, stage: Stage) -> None:
        self.context = stage.context("rollout", bus)
        self.issued = PromptIssued("p000000", 0, 1, [PromptRow("^ab=")])
        self.deliveries = 0

    async def deliver(self) -> Progress:
        """The progress of the next delivery, as far as it is found again."""
        self.deliveries += 1
        record = Record(PROMPTS, 1, "asyncrl.run.prompt.issued.p000000-0", {}, b"", 0)
        delivery = Delivery[PromptIssued](
            self.context, record, Position(self.deliveries, 1, 1, 0, 0), Msg(self.context.bus.client)
        )
        reader = ProgressReader(self.context.bus, self.context.refuse)
        progress = Progress(self.context, self.issued, delivery, ProgressLog(self.context), reader)
        assert not await progress.look()
        return progress

    async def answer(self, progress: Progress, *calls: str) -> None:
        """Store one entry for each further tool call."""
        for call in calls:
            progress.journal.answers[str(len(progress.journal.answers))] = Answer(f"tool:{call}", "", result=b"\xc0")
            await progress.keep()


@pytest.mark.parametrize(("lost", "found"), [(0, ""), (1, "a"), (2, "ab"), (3, "abc"), (4, "abcd")])
async def test_nothing_behind_a_missing_entry_is_continued(
    bus: Bus, stage: Callable[..., Stage], lost: int, found: str
):
    rollout = Rollout(bus, stage())
    await rollout.answer(await rollout.deliver(), *"abc")
    await rollout.answer(await rollout.deliver(), *"de")
    subject, entries = PROGRESS_STORED.pattern(bus.run), []
    while (record := await read_next(bus, TRAJECTORIES, subject, entries[-1] + 1 if entries else 1)) is not None:
        entries.append(record.sequence)

    await bus.api(f"STREAM.MSG.DELETE.{TRAJECTORIES.full_name(bus.run)}", {"seq": entries[lost]})

    progress = await rollout.deliver()
    assert [answer.call for answer in progress.journal.answers.values()] == [f"tool:{call}" for call in found]
    await rollout.answer(progress, "f")
    progress = await rollout.deliver()
    assert [answer.call for answer in progress.journal.answers.values()] == [f"tool:{call}" for call in found + "f"]
