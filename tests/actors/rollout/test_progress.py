"""The progress of trajectories on a rollout worker: stored or a fault of the worker, and continued without gaps."""

import asyncio
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from actors.rollout.progress import Progress, ProgressLog, ProgressReader
from actors.runtime.delivery import Delivery
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_next
from asyncrl.bus.pull import Position
from harness.stage import Connect, Stage
from topics.prompts import PromptIssued, PromptRow
from topics.topic import BLOBS, PROMPTS, TRAJECTORIES
from topics.trajectories import PROGRESS_STORED, Answer, ProgressEntry
from topics.wire import INLINE_BYTES


class OneAnswer:
    """A trajectory's progress with one large answer."""

    def entry(self) -> ProgressEntry:
        answer = Answer("tool:look", "", result=bytes(200))
        return ProgressEntry(trajectory_id="p000000-0", offset=0, journal={"0": answer})

    def stored(self, entry: ProgressEntry) -> None:
        """Nothing follows from it."""


class Routed(OneAnswer):
    """A trajectory's progress with the experts of many tokens."""

    def __init__(self, number: int) -> None:
        self._name = f"p000000-{number}"

    def entry(self) -> ProgressEntry:
        answer = Answer("generate", "", routing=bytes(INLINE_BYTES // 2), route_bytes=1)
        return ProgressEntry(trajectory_id=self._name, offset=0, journal={"0": answer})


class Unreadable(OneAnswer):
    """A trajectory whose progress cannot be told."""

    def entry(self) -> ProgressEntry:
        raise LookupError("no such call")


async def test_progress_whose_chunks_cannot_be_stored_ends_the_worker_with_that_error(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.bus.blobs.INLINE_BYTES", 100)
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


async def test_the_experts_of_tokens_count_for_the_size_of_a_message(bus: Bus, stage: Callable[..., Stage]):
    context = stage().context("rollout", bus)
    log = ProgressLog(context)

    await asyncio.gather(*(log.store(Routed(number)) for number in range(3)))

    assert len(await stored(bus)) == 3
    assert not context.faults


async def stored(bus: Bus) -> list[int]:
    """Sequences of the messages of progress."""
    found: list[int] = []
    pattern = PROGRESS_STORED.pattern(bus.run)
    while (record := await read_next(bus, TRAJECTORIES, pattern, found[-1] + 1 if found else 1)) is not None:
        found.append(record.sequence)
    return found


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
        assert not await progress.load_existing()
        return progress

    async def answer(self, progress: Progress, *calls: str) -> None:
        """Store one entry for each further tool call."""
        for call in calls:
            progress.journal.answers[str(len(progress.journal.answers))] = Answer(f"tool:{call}", "", result=b"\xc0")
            await progress.checkpoint()


@pytest.mark.parametrize(("lost", "found"), [(0, ""), (1, "a"), (2, "ab"), (3, "abc"), (4, "abcd")])
async def test_nothing_behind_a_missing_entry_is_continued(
    bus: Bus, stage: Callable[..., Stage], lost: int, found: str
):
    rollout = Rollout(bus, stage())
    await rollout.answer(await rollout.deliver(), *"abc")
    await rollout.answer(await rollout.deliver(), *"de")
    entries = await stored(bus)

    await bus.api(f"STREAM.MSG.DELETE.{TRAJECTORIES.full_name(bus.run)}", {"seq": entries[lost]})

    progress = await rollout.deliver()
    assert [answer.call for answer in progress.journal.answers.values()] == [f"tool:{call}" for call in found]
    await rollout.answer(progress, "f")
    progress = await rollout.deliver()
    assert [answer.call for answer in progress.journal.answers.values()] == [f"tool:{call}" for call in found + "f"]
