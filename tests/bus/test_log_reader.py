"""Reading logs: in order and without gaps, whatever the server forgets."""

import asyncio
import threading
from collections.abc import Mapping

import pytest
from nats.aio.msg import Msg

from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_newest
from asyncrl.bus.publish import publish
from asyncrl.bus.pull import Puller
from asyncrl.bus.server import EmbeddedServer
from harness.logs import read_all
from harness.published_messages import issue
from harness.stage import DEADLINE_S, LEASE_S, Connect, provision_leased, until
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, VITALS_TAKEN, ActorStopped
from topics.table import BUILT_IN
from topics.topic import ACTORS, PROMPTS, VITALS, Stream
from topics.weights import WEIGHTS_STORED


async def publish_starts(bus: Bus, count: int, first: int = 0) -> None:
    """Odd sequences start, even ones stop."""
    for number in range(first, first + count):
        topic = ACTOR_STOPPED if number % 2 else ACTOR_STARTED
        await bus.store(topic.subject(bus.run, f"a-{number}"), b"body", {"number": str(number)})


async def test_a_log_is_read_in_order_from_its_beginning(bus: Bus):
    await publish_starts(bus, 30)

    records = await read_all(bus, ACTORS)

    assert [record.sequence for record in records] == list(range(1, 31))
    assert [record.headers["number"] for record in records] == [str(number) for number in range(30)]
    assert all(record.time_ns > 0 and record.data == b"body" for record in records)


async def test_a_log_is_read_after_a_sequence(bus: Bus):
    await publish_starts(bus, 10)

    assert [record.sequence for record in await read_all(bus, ACTORS, after=7)] == [8, 9, 10]
    assert await read_all(bus, ACTORS, after=10) == []


async def test_a_log_is_read_by_subject_and_by_headers_alone(bus: Bus):
    await publish_starts(bus, 6)

    records = await read_all(bus, ACTORS, subjects=[ACTOR_STOPPED.pattern(bus.run)], headers_only=True)

    assert [record.sequence for record in records] == [2, 4, 6]
    assert [record.headers["number"] for record in records] == ["1", "3", "5"]
    assert {record.data for record in records} == {b""}


async def test_an_empty_log_is_caught_up_at_once_and_followed_from_then_on(bus: Bus):
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append)
    await reader.start()
    assert reader.caught_up.is_set()

    await publish_starts(bus, 3)

    await until(lambda: len(records) == 3, "three records are followed")
    await reader.close()


async def consumers(bus: Bus, stream: Stream = ACTORS) -> list[str]:
    names: list[str] = (await bus.api(f"CONSUMER.NAMES.{stream.full_name(bus.run)}"))["consumers"] or []
    return names


async def test_a_reader_whose_consumer_is_deleted_goes_on_where_it_was(bus: Bus):
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append)
    await reader.start()
    await publish_starts(bus, 5)
    await until(lambda: len(records) == 5, "the first half is read")

    for name in await consumers(bus):
        await bus.api(f"CONSUMER.DELETE.{ACTORS.full_name(bus.run)}.{name}")
    await publish_starts(bus, 5, first=5)

    await until(lambda: len(records) == 10, "the second half is read")
    assert [record.sequence for record in records] == list(range(1, 11))
    await reader.close()


async def test_what_was_on_its_way_when_the_connection_broke_is_read_again(
    bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    """No message behind it shows that it is missing."""
    records: list[Record] = []
    reader, other = LogReader(bus, ACTORS, records.append), await connect(bus.run)
    await reader.start()
    [name] = await consumers(bus)

    async def sent() -> bool:
        info = await other.api(f"CONSUMER.INFO.{ACTORS.full_name(bus.run)}.{name}")
        return bool(info["delivered"]["consumer_seq"] == 3)

    async def lose(*_: object) -> None:
        """Take the place of a socket that breaks."""

    with monkeypatch.context() as patched:
        patched.setattr(bus.client, "_process_msg", lose)
        await publish_starts(other, 3)
        await until(sent, "the server has sent them")
    await bus.client._process_op_err(ConnectionResetError())

    await until(lambda: len(records) == 3, "they are read")
    assert [record.sequence for record in records] == [1, 2, 3]
    await reader.close()


async def test_vital_signs_are_followed_when_the_server_that_had_them_in_memory_is_started_again(
    bus: Bus, server: EmbeddedServer
):
    records: list[Record] = []
    reader = LogReader(bus, VITALS, records.append)
    await reader.start()
    for number in range(9):
        await bus.store(VITALS_TAKEN.subject(bus.run, f"a-{number}"), b"", {"number": str(number)})
    await until(lambda: len(records) == 9, "all are read")

    assert server.process is not None
    server.process.kill()
    await server.process.wait()
    await server.start()
    await provision_leased(bus, LEASE_S)
    await bus.store(VITALS_TAKEN.subject(bus.run, "a-1"), b"", {"number": "9"})

    await until(lambda: len(records) == 10, "it is read, though its sequence was another one's before")
    assert (records[-1].sequence, records[-1].headers["number"]) == (1, "9")

    await bus.api(f"CONSUMER.DELETE.{VITALS.full_name(bus.run)}.{(await consumers(bus, VITALS))[0]}")
    await bus.store(VITALS_TAKEN.subject(bus.run, "a-2"), b"", {"number": "10"})
    await until(lambda: len(records) == 11, "what is new is read")
    assert records[-1].headers["number"] == "10"  # and what it had read is not handed on again

    reader._seen = {subject: at + 3_600_000_000_000 for subject, at in reader._seen.items()}  # the clock is set back
    await bus.store(VITALS_TAKEN.subject(bus.run, "a-2"), b"", {"number": "11"})
    await until(lambda: len(records) == 12, "what is new is read, though what came before is later")
    await reader.close()


async def test_a_closed_reader_leaves_no_consumer_behind(bus: Bus):
    await publish_starts(bus, 3)
    await read_all(bus, ACTORS)

    await until(lambda: no_consumers(bus), "the consumer is gone")


async def no_consumers(bus: Bus) -> bool:
    return await consumers(bus) == []


async def test_a_reader_reads_a_log_longer_than_its_window(bus: Bus):
    subject = ACTOR_STARTED.subject(bus.run, "a")
    await asyncio.gather(*(bus.store(subject, b"", {}) for _ in range(3000)))

    assert [record.sequence for record in await read_all(bus, ACTORS)] == list(range(1, 3001))


async def test_an_idle_reader_keeps_its_consumer(bus: Bus):
    reader = LogReader(bus, ACTORS, lambda record: None)
    await reader.start()
    [before] = await consumers(bus)

    await asyncio.sleep(1.3)  # the puller's watch has looked at least once

    assert await consumers(bus) == [before]
    await reader.close()


@pytest.mark.parametrize("kind", [AttributeError, OSError, TimeoutError])
async def test_what_a_fold_raises_is_not_lost(bus: Bus, kind: type[Exception]):
    faults: list[BaseException] = []
    bus.on_fault = faults.append

    def refuse(record: Record) -> None:
        raise kind(f"record {record.sequence} is not what I thought")

    reader = LogReader(bus, ACTORS, refuse)
    await reader.start()
    await publish_starts(bus, 1)

    await until(lambda: len(faults) == 1, "the fault is told")
    assert str(faults[0]) == "record 1 is not what I thought"
    await reader.close()


async def test_a_log_whose_last_message_goes_before_it_is_delivered_is_read_to_its_end(bus: Bus):
    stopped = [ActorStopped("rollout", f"rollout-{number}") for number in range(3)]
    sequences = [await publish(bus, message) for message in stopped]
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append, paced=2)
    await reader.start()
    await until(lambda: len(records) == 2, "all but the last are read")

    await bus.api(f"STREAM.MSG.DELETE.{ACTORS.full_name(bus.run)}", {"seq": sequences[-1]})

    await asyncio.wait_for(reader.caught_up.wait(), DEADLINE_S)
    await reader.close()


async def test_a_log_whose_last_message_is_gone_has_a_newest_one_and_is_not_read_before_that(bus: Bus, monkeypatch):
    monkeypatch.setattr("asyncrl.bus.log._POLL_S", 0.01)
    await issue(bus, 5)
    await bus.api(f"STREAM.MSG.DELETE.{PROMPTS.full_name(bus.run)}", {"seq": 5})
    newest = await read_newest(bus, PROMPTS)
    assert newest is not None and newest.sequence == 4
    records: list[Record] = []
    reader = LogReader(bus, PROMPTS, records.append, paced=2)
    await reader.start()
    await until(lambda: len(records) == 2, "two messages")
    await asyncio.sleep(0.2)  # many looks for the end
    assert not reader.caught_up.is_set()

    reader.more(2)

    await until(reader.caught_up.is_set, "the end")
    assert [record.sequence for record in records] == [1, 2, 3, 4]
    await reader.close()


async def test_a_reader_that_is_closed_answers_no_message(bus: Bus, monkeypatch):
    """Its user may not acknowledge: the answer would be refused, and end the actor."""
    taken, sent = [], []
    puller = Puller(bus, f"{ACTORS.full_name(bus.run)}.reader", taken.append)
    await puller.start(1)
    await puller.close()
    monkeypatch.setattr(bus, "send", lambda *words: sent.append(words))

    await puller._receive(Msg(bus.client, data=b"late", reply="$JS.ACK.stream.reader.1.1.1.1.0"))

    assert (taken, sent) == ([], [])


async def test_messages_with_damaged_headers_are_handed_on_without_these_and_end_no_read_loop(bus: Bus):
    status = b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0 503 \xff\xfe\r\n\r\n"
    for number, headers in enumerate([*status, b"NATS/1.0", b"no headers"]):
        subject = BUILT_IN.ingest_of(ACTOR_STARTED.subject(bus.run, f"a-{number}")).encode()
        sizes = len(headers), len(headers) + 4
        await bus.client._send_command(b"HPUB %s %d %d\r\n%sbody\r\n" % (subject, *sizes, headers))
    await publish_starts(bus, 1)

    records = await read_all(bus, ACTORS)

    assert [(record.sequence, record.data) for record in records] == [(number, b"body") for number in range(1, 6)]
    assert [record.headers.get("number") for record in records] == [None] * 4 + ["0"]


async def test_a_reader_that_asked_for_no_more_does_not_wait_for_the_server(bus: Bus):
    """The disk that its messages are written to stands still, not the server."""
    await publish_starts(bus, 3)
    looks = iter(range(5))
    reader = LogReader(bus, ACTORS, lambda _: None, paced=1)
    await reader.start()

    await reader.wait(lambda: next(looks, None) is None, silent_s=0.01)

    assert reader.last <= 1
    await reader.close()


async def test_nothing_takes_a_chunk_once_the_reader_is_cancelled(bus: Bus):
    """The directory that chunks are written to is removed then."""
    for number in range(3):
        await bus.store(WEIGHTS_STORED.subject(bus.run, "name"), b"", {"number": str(number)})
    begun, release, taken = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def take(headers: Mapping[str, str], _body: bytes) -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait()
        taken.append(headers["number"])

    reading = asyncio.create_task(ChunkLog(bus, WEIGHTS_STORED).read("name", take))
    await begun.wait()
    reading.cancel()
    await asyncio.sleep(0)
    loop.call_later(0.05, release.set)

    await asyncio.wait({reading})

    assert reading.cancelled() and taken == ["0"]
