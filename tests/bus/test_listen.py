"""Listening: messages in their order, decoded, large ones too, and what is none of them named."""

from collections.abc import Callable

import pytest

from asyncrl.bus.blobs import BLOB
from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import publish
from harness.logs import read_all
from harness.stage import Stage
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.topic import BATCHES
from topics.trajectories import Reference
from topics.wire import INLINE_BYTES


async def test_a_large_message_is_handed_over_in_its_turn(bus: Bus, stage: Callable[..., Stage]):
    member = BatchMember("p000000-0", 0, Reference(1, "0" * 16, 100), 1.0, 3)
    large = [BatchGroup("p000000", [member] * 16_000)]
    for step, groups in ((1, []), (2, large), (3, [])):
        await publish(bus, BatchPacked(step, "rl", groups, 0), headers={"writer": "test"})
    records = await read_all(bus, BATCHES)
    assert [BLOB in record.headers for record in records] == [False, True, False]
    context, received = stage().context("recorder", bus), []
    listener = context.listen(BATCHES, lambda _, message, __: received.append((message.step, len(message.groups))))

    for record in [*records, records[1]._replace(headers={**records[1].headers, BLOB: "gone:1:00:1"})]:
        listener.subscribe(record)
    assert received == [(1, 0)]  # the others wait for the large one
    await listener.handed_over()

    assert received == [(1, 0), (2, 1), (3, 0)]
    assert context.vitals["dead_letters"] == 1
    assert not context.faults


async def test_a_message_that_is_not_to_be_read_is_handed_over_by_its_headers(bus: Bus, stage: Callable[..., Stage]):
    for step in (1, 2):
        await publish(bus, BatchPacked(step, "rl", [], 0), headers={"writer": "test"})
    first, second = await read_all(bus, BATCHES)
    gone = first._replace(headers={**first.headers, BLOB: "gone:1:00:1"})
    context, received = stage().context("recorder", bus), []
    listener = context.listen(
        BATCHES, lambda _, message, record: received.append((record.sequence, type(message))), unread=gone.__eq__
    )

    for record in (gone, second):
        listener.subscribe(record)

    assert received == [(1, BatchPacked.HEADERS), (2, BatchPacked)]
    assert listener.last == 2
    assert "dead_letters" not in context.vitals


async def test_a_reader_of_a_whole_log_gets_its_large_messages_and_its_errors(bus: Bus):
    member = BatchMember("p000000-0", 0, Reference(1, "0" * 16, 100), 1.0, 3)
    for step, members in ((1, [member]), (2, [member] * 16_000), (3, [member])):
        batch = BatchPacked(step, "rl", [BatchGroup("p000000", members)], 0)
        await publish(bus, batch, headers={"writer": "test"})
    steps, sizes, refused, faults = [], [], [], []
    bus.on_fault = faults.append

    def take(_, message, record):
        steps.append(message.step)
        sizes.append(len(record.data))
        if message.step == 3:
            raise ValueError("a third batch is not what it must be")

    follower = Listener(bus, BATCHES, take, lambda record, _: refused.append(record.sequence))
    await follower.start()
    await follower.caught_up()
    await follower.close()
    assert (steps, refused, follower.last) == ([1, 2, 3], [3], 3)
    assert min(sizes) > 0 and sizes[1] > INLINE_BYTES

    steps.clear()
    await read_merged(bus, [Part(BATCHES, after=1)], take, lambda record, _: refused.append(record.sequence))
    assert (steps, refused) == ([2, 3], [3, 3])

    with pytest.raises(AttributeError, match="steps"):
        await read_merged(bus, [Part(BATCHES)], lambda _, message, __: message.steps, lambda *_: None)
    assert faults == []
