"""The progress of trajectories on a rollout worker: stored or a fault of the worker, and continued without gaps."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from nats.aio.msg import Msg

from actors.rollout.progress import Progress, ProgressLog, ProgressReader
from actors.runtime.delivery import Delivery
from asyncrl.bus.blobs import CHUNKS, blob_named
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_message, read_next
from asyncrl.bus.pull import Position
from harness.stage import Connect, Stage
from topics.actors import Waiting
from topics.payload_refs import ROUTING, Experts
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
        answer = Answer("generate", "", routing=Experts(1, rows=bytes(INLINE_BYTES // 2)))
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


async def test_the_seconds_of_a_delivery_are_counted_by_activity(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    now = [10.0]
    monkeypatch.setattr("actors.runtime.delivery.time", SimpleNamespace(monotonic=lambda: now[0]))
    record = Record(PROMPTS, 1, "asyncrl.run.prompt.issued.p000000-0", {}, b"", 0)
    context = stage().context("rollout", bus)
    delivery = Delivery[PromptIssued](context, record, Position(1, 1, 1, 0, 0), Msg(bus.client), _waits_since=10.0)

    now[0] = 11.0
    with delivery.waiting(Waiting("version")):
        now[0] = 13.0
    delivery.waits_for = Waiting("engine", "engine-1")
    now[0] = 13.25
    delivery.waits_for = Waiting("engine", "engine-2")
    now[0] = 14.0

    assert delivery.spans == "generate:1.0000,hold:2.0000,other:1.0000"


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


ROW = 48 * 8  # bytes: layers of Qwen3-30B-A3B and experts of a token in each


async def routed_turns(rollout: Rollout, turns: int, tokens: int, width: int) -> None:
    """Store turns, a tool call after each, with experts for each of their tokens, an eighth of which is observed."""
    progress, logprobs = await rollout.deliver(), np.zeros(tokens * 7 // 8, np.float32)
    for turn in range(turns):
        answer = Answer("generate", "0" * 16, tokens=logprobs.astype(np.int32), logprobs=logprobs)
        answer.versions = np.zeros(1, np.int32)
        rows = np.full(tokens * width, turn + 1, np.uint8).tobytes()
        answer.routing = Experts(width, follows=str(2 * turn - 2) if turn else "", first=turn * tokens, rows=rows)
        progress.journal.answers[str(2 * turn)] = answer
        await rollout.answer(progress, "look")


@pytest.mark.parametrize(("turns", "tokens", "width"), [(8, 1024, ROW), (1, 8192, ROW), (1, 16_384, 2 * ROW)])
async def test_rows_of_experts_lie_beside_the_messages_of_progress(
    bus: Bus, stage: Callable[..., Stage], turns: int, tokens: int, width: int
):
    """Prints the bytes of docs/internals/routing-replay.md; the rows of the last case exceed one NATS message."""
    rollout = Rollout(bus, stage())
    await routed_turns(rollout, turns, tokens, width)
    records = [await read_message(bus, TRAJECTORIES, at) for at in await stored(bus)]
    sizes = [len(record.data) for record in records if record is not None]
    beside = [blob_named(record.headers[ROUTING]).size for record in records if record is not None]
    inside = sum(sizes) + sum((turn + 1) * tokens * width for turn in range(turns))  # each with those of its prompt
    found = f"before {inside:,}; messages {sum(sizes):,}, largest {max(sizes):,}, blobs {sum(beside):,}"
    print(f"{turns} turns of {tokens:,} tokens: {found}")
    assert sum(beside) == turns * tokens * width and max(sizes) < 9 * tokens
    assert (sum(beside) > bus.max_payload) == (tokens == 16_384)

    answers = (await rollout.deliver()).journal.answers
    found = [answer.routing for answer in answers.values() if answer.routing is not None]
    assert [one.first for one in found] == [turn * tokens for turn in range(turns)]
    assert [one.rows for one in found] == [bytes([turn + 1]) * (tokens * width) for turn in range(turns)]


async def test_progress_behind_rows_that_are_gone_is_not_continued(bus: Bus, stage: Callable[..., Stage]):
    rollout = Rollout(bus, stage())
    await routed_turns(rollout, 3, 8, 4)
    record = await read_message(bus, TRAJECTORIES, (await stored(bus))[1])
    assert record is not None
    name = blob_named(record.headers[ROUTING]).name
    chunk = {"filter": CHUNKS[BLOBS].subject(bus.run, f"{name}-0")}
    await bus.api(f"STREAM.PURGE.{BLOBS.full_name(bus.run)}", chunk)

    progress = await rollout.deliver()
    assert list(progress.journal.answers) == ["0", "1"]
    assert rollout.context.vitals["dead_letters"] == 1  # of the message: its experts are gone
