"""Several logs are read as one: in the order of time, each up to its end, few messages at a time."""

import pytest

from asyncrl.bus.blobs import BLOB
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone
from asyncrl.bus.log import LogReader
from asyncrl.bus.merged_reader import Part, newest_message, read_merged
from asyncrl.bus.publish import WRITER, publish
from asyncrl.bus.pull import Puller
from harness.stories import result
from topics.groups import GroupDropped
from topics.topic import BATCHES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED

COUNT = 150  # of each log, several times what is held of it


class Received:
    """Records that were handed over."""

    def __init__(self):
        self.names, self.times, self.bodies, self.refused = [], [], [], []

    def take(self, topic, message, record):
        self.names.append((topic.name, record.sequence))
        self.times.append(record.time_ns)
        self.bodies.append(message)

    def refuse(self, record, error):
        self.refused.append((record.stream.name, record.sequence, type(error).__name__))


async def write(bus: Bus, first: int = 0) -> None:
    for number in range(first, first + COUNT):
        await publish(bus, result(f"p{number:06d}-0", (0, 0)))
        drop = GroupDropped(f"p{number:06d}", "lag")
        await publish(bus, drop, headers={WRITER: "test"})


async def test_the_oldest_message_of_all_logs_comes_first_and_nothing_behind_the_ends(bus: Bus):
    await write(bus)
    await write(bus, COUNT)
    received = Received()

    await read_merged(bus, [Part(BATCHES, COUNT), Part(TRAJECTORIES, COUNT + 5)], received.take, received.refuse)

    assert received.times == sorted(received.times)
    expected = [(name, at) for at in range(1, COUNT + 1) for name in ("trajectory.generated", "group.dropped")]
    assert received.names == expected + [("trajectory.generated", at) for at in range(COUNT + 1, COUNT + 6)]
    assert not received.refused


async def test_no_more_of_a_log_is_held_than_its_share(bus: Bus, monkeypatch):
    await write(bus)
    held, most = 0, 0
    receive = LogReader._receive

    def counted(reader, message):
        nonlocal held, most
        held += 1
        most = max(most, held)
        receive(reader, message)

    def take(*_):
        nonlocal held
        held -= 1

    monkeypatch.setattr(LogReader, "_receive", counted)
    parts = [Part(BATCHES, COUNT), Part(TRAJECTORIES, COUNT, headers_only=True)]
    await read_merged(bus, parts, take, lambda *_: None)

    ahead = Part(BATCHES, 1).ahead
    assert ahead < most <= ahead + COUNT  # headers are small: more of them may wait


async def test_bodies_in_blobs_are_fetched_and_what_cannot_be_read_is_refused_in_its_turn(bus: Bus, monkeypatch):
    monkeypatch.setattr("asyncrl.bus.blobs.INLINE_BYTES", 100)
    await publish(bus, result("p000000-0", (0,) * 50))
    monkeypatch.undo()
    await bus.store(TRAJECTORY_GENERATED.subject(bus.run, "p000001-0"), b"garbage", {})
    await bus.store(TRAJECTORY_GENERATED.subject(bus.run, "p000002-0"), b"", {BLOB: "gone:1:00:1"})
    await publish(bus, result("p000003-0", (0,)))
    received = Received()

    def take(topic, message, record):
        received.take(topic, message, record)
        if message.trajectory_id == "p000003-0":
            raise LookupError("nobody asked for it")

    await read_merged(bus, [Part(TRAJECTORIES, 4)], take, received.refuse)

    assert [len(message.segments[0].tokens) for message in received.bodies] == [50, 1]
    assert [(sequence, error) for _, sequence, error in received.refused] == [
        (2, "WireError"),
        (3, "BlobMissing"),
        (4, "LookupError"),
    ]


async def test_a_log_whose_last_messages_are_gone_ends_all_the_same(bus: Bus):
    await write(bus)
    await bus.api(f"STREAM.MSG.DELETE.{BATCHES.full_name(bus.run)}", {"seq": COUNT})
    received = Received()

    await read_merged(bus, [Part(BATCHES, COUNT), Part(TRAJECTORIES, 0)], received.take, received.refuse)

    assert received.names[-1] == ("group.dropped", COUNT - 1)


async def test_a_server_that_falls_silent_is_named(bus: Bus, monkeypatch):
    await write(bus)
    monkeypatch.setattr("asyncrl.bus.merged_reader._SILENT_S", 0.2)

    async def lose(*_: object) -> None:
        """Take the place of a server that sends nothing."""

    monkeypatch.setattr(Puller, "_receive", lose)

    with pytest.raises(BusGone, match="the server sent nothing of BATCHES behind message 0 for 0 s"):
        await read_merged(bus, [Part(BATCHES, COUNT)], lambda *_: None, lambda *_: None)


@pytest.mark.parametrize("key", [None, "p000001-0"])
async def test_the_newest_message_is_the_newest_one_that_can_be_read(bus: Bus, key: str | None):
    assert await newest_message(bus, TRAJECTORY_GENERATED, key) is None
    await publish(bus, result("p000001-0", (0, 0)))
    await bus.store(TRAJECTORY_GENERATED.subject(bus.run, "p000001-0"), b"garbage", {})
    await bus.store(TRAJECTORY_GENERATED.subject(bus.run, "p000001-0"), b"more garbage", {})

    message, record = await newest_message(bus, TRAJECTORY_GENERATED, key)

    assert (message.trajectory_id, record.sequence) == ("p000001-0", 1)
