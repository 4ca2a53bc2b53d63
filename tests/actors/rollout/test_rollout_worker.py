"""A rollout worker and the rows of its prompts: where it reads them, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from actors.rollout.actor import RolloutWorker
from asyncrl.bus.connection import Bus
from asyncrl.bus.group_rows import GroupRows, RowsUnreadable, read_rows
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from harness.stage import Connect, Stage, until
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.prompts import Stage as Kind
from topics.topic import GRADES, PROMPTS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TrajectoryFailed, TrajectoryGenerated
from topics.wire import decode

ROW = PromptRow("^ab=", "ba")
SIZE = 4


def issued(prompt_id: str, member: int, *rows: PromptRow, size: int = SIZE, stage: Kind = "rl") -> PromptIssued:
    return PromptIssued(prompt_id=prompt_id, member=member, group_size=size, rows=list(rows), stage=stage)


async def issue(bus: Bus, *messages: PromptIssued) -> None:
    for message in messages:
        await publish(bus, message)


# --- rows


async def test_members_of_a_group_read_its_row_once(bus: Bus, connect: Connect):
    asked = []
    witness = await connect(bus.run)
    await witness.client.subscribe(f"$JS.API.DIRECT.GET.{PROMPTS.full_name(bus.run)}", cb=collect(asked))
    await witness.client.flush()
    await issue(bus, issued("p000001", 0, ROW), issued("p000001", 1))
    rows = GroupRows(bus)

    found = await asyncio.gather(*(rows.of(issued("p000001", member)) for member in range(1, SIZE)))
    found.append(await rows.of(issued("p000001", 1)))

    assert found == [[ROW]] * SIZE
    await witness.client.flush()
    assert len(asked) == 1


def collect(into):
    async def take(message):
        into.append(message)

    return take


async def test_members_that_arrive_with_the_first_one_cost_no_request(connect: Connect):
    rows = GroupRows(await connect("not-provisioned"))
    rows.learn(issued("r000001", 0, ROW))

    assert await rows.of(issued("r000001", 3)) == [ROW]


async def test_rows_of_a_trajectory_issued_again_are_those_of_its_first_attempt(bus: Bus):
    again = issued("p000001", 0)
    again.attempt = 1
    await issue(bus, issued("p000001", 0, ROW), again)

    assert await GroupRows(bus).of(again) == [ROW]


async def test_rows_that_cannot_be_read_are_named(bus: Bus):
    subject = PROMPT_ISSUED.subject(bus.run, "p000002-0")
    await bus.store(subject, b"garbage", {"trajectory": "p000002-0", "attempt": "0"})
    await issue(bus, issued("p000003", 0))

    for prompt_id, words in (
        ("p000001", "the row of p000001 is stored with p000001-0, which was never issued"),
        ("p000002", "stored with p000002-0, message 1 of PROMPTS, which cannot be read: not a PromptIssued"),
        ("p000003", "should be stored with p000003-0, message 2 of PROMPTS, which carries none"),
    ):
        with pytest.raises(RowsUnreadable, match=words):
            await read_rows(bus, prompt_id)


# --- refusals


class Received:
    """Messages that a worker published."""

    def __init__(self) -> None:
        self.results: dict[str, TrajectoryGenerated] = {}
        self.failures: dict[str, TrajectoryFailed] = {}

    def take(self, record: Record) -> None:
        name = record.subject.rsplit(".", 1)[1]
        if f".{TRAJECTORY_GENERATED.name}." in record.subject:
            self.results[name] = decode(TrajectoryGenerated, record.data)
        elif f".{TRAJECTORY_FAILED.name}." in record.subject:
            self.failures[name] = decode(TrajectoryFailed, record.data)


@pytest.fixture
async def received(bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Received]:
    """A worker inside the test, without any engine: what it says of what needs none."""
    made = stage(rollout={"group_size": SIZE})
    made.make_model()
    context, received = made.context("rollout", bus), Received()
    readers = [LogReader(bus, stream, received.take) for stream in (TRAJECTORIES, GRADES)]
    for reader in readers:
        await reader.start()
    working = asyncio.create_task(RolloutWorker(context).run())
    yield received
    context.stop.set()
    await asyncio.wait_for(working, 120)
    for reader in readers:
        await reader.close()
    assert not context.faults


async def test_members_of_a_group_whose_row_cannot_be_read_fail_with_the_reason(bus: Bus, received: Received):
    subject = PROMPT_ISSUED.subject(bus.run, "p000001-0")
    await bus.store(subject, b"garbage", {"trajectory": "p000001-0", "attempt": "0"})
    await issue(bus, *(issued("p000001", member) for member in range(1, SIZE)))

    await until(lambda: len(received.failures) == SIZE - 1, "every other member fails")

    assert {failure.reason for failure in received.failures.values()} == {"refused"}
    assert "p000001-0, message 1 of PROMPTS, which cannot be read" in received.failures["p000001-3"].detail


async def test_a_supervised_row_too_long_for_the_model_is_refused(bus: Bus, received: Received):
    long, brim = (PromptRow("a" * length, "b" * 10) for length in (54, 53))  # of 64 one token ends the answer
    await issue(bus, issued("w000001", 0, ROW, long, size=1, stage="warmup"))
    await issue(bus, issued("w000002", 0, ROW, brim, size=1, stage="warmup"))

    await until(lambda: "w000002-0" in received.results, "the row that fits is encoded")
    await until(lambda: "w000001-0" in received.failures, "the row that does not fit is refused")

    assert [len(segment.tokens) for segment in received.results["w000002-0"].segments] == [7, 64]
    assert received.failures["w000001-0"].reason == "refused"
    assert "has 65 tokens and at most 64 fit" in received.failures["w000001-0"].detail
