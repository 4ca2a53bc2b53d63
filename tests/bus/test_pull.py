"""Reading: work that is leased, credit that is respected, logs without gaps."""

import asyncio

from nats.aio.msg import Msg

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_newest
from asyncrl.bus.provision import make_queue, queue_states
from asyncrl.bus.publish import publish
from asyncrl.bus.pull import Puller, position
from asyncrl.bus.server import EmbeddedServer
from harness.stage import DEADLINE_S, LEASE_S, Connect, until
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, ActorStopped
from topics.prompts import PROMPT_ISSUED
from topics.table import QUEUES
from topics.topic import ACTORS, PROMPTS


async def issue(bus: Bus, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await bus.store(PROMPT_ISSUED.subject(bus.run, f"p{number:06d}-0"), b"", {})


class Hands:
    """A worker's hands: takes what it gets, and does nothing with it."""

    def __init__(self, bus: Bus) -> None:
        self.got: list[Msg] = []
        self.lost: list[str] = []
        self.puller = Puller(bus, PROMPTS.full_name(bus.run), "rollout", self.got.append, on_lost=self.lost.append)

    @property
    def sequences(self) -> list[int]:
        return [position(message.reply).stream_sequence for message in self.got]

    async def hold(self, count: int) -> None:
        await until(lambda: len(self.got) >= count, f"{count} messages, {len(self.got)} came")


async def open_requests(bus: Bus) -> int:
    """Pull requests that wait at the server."""
    info = await bus.api(f"CONSUMER.INFO.{PROMPTS.full_name(bus.run)}.rollout")
    return int(info["num_waiting"])


async def settled(bus: Bus) -> None:
    """Everything the server sent before this has arrived and has been handed on."""
    for _ in range(3):
        await bus.client.flush()
        await asyncio.sleep(0.02)


async def test_no_more_messages_come_than_were_granted(bus: Bus):
    await issue(bus, 20)
    hands = Hands(bus)

    await hands.puller.start(5)
    await hands.hold(5)
    await settled(bus)
    assert len(hands.got) == 5

    for granted in (1, 3, 11):
        before = len(hands.got)
        hands.puller.grant(granted)
        await hands.hold(before + granted)
        await settled(bus)
        assert len(hands.got) == before + granted
    assert sorted(hands.sequences) == list(range(1, 21))
    await hands.puller.close()


async def open_requests_is(bus: Bus, count: int) -> bool:
    return await open_requests(bus) == count


async def test_a_puller_beyond_a_limit_of_the_server_asks_again_after_a_pause(bus: Bus):
    stream = PROMPTS.full_name(bus.run)
    config = (await bus.api(f"CONSUMER.INFO.{stream}.rollout"))["config"]
    await bus.api(f"CONSUMER.DELETE.{stream}.rollout")
    body = {"stream_name": stream, "config": {**config, "max_waiting": 1}, "action": "create"}
    await bus.api(f"CONSUMER.DURABLE.CREATE.{stream}.rollout", body)
    asked: list[float] = []

    async def note(message: Msg) -> None:
        asked.append(asyncio.get_running_loop().time())

    first, second = Hands(bus), Hands(bus)
    await first.puller.start(1)
    await until(lambda: open_requests_is(bus, 1), "the only place is taken")
    await bus.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.rollout", cb=note)

    await second.puller.start(1)
    await until(lambda: len(asked) >= 3, "it asks again")

    assert asked[2] - asked[0] > 1.5
    await issue(bus, 2)
    await first.hold(1)
    await second.hold(1)
    await first.puller.close()
    await second.puller.close()


async def test_an_idle_puller_asks_once_and_keeps_to_its_credit(bus: Bus):
    hands = Hands(bus)
    await hands.puller.start(3)

    await asyncio.sleep(1.3)  # the watch has looked at least once

    assert hands.lost == []
    await issue(bus, 10)
    await hands.hold(3)
    await settled(bus)
    assert len(hands.got) == 3
    await hands.puller.close()


async def test_a_reconnect_asks_again_for_what_was_open_and_for_no_more(bus: Bus, server: EmbeddedServer):
    hands = Hands(bus)
    await hands.puller.start(4)
    await issue(bus, 1)
    await hands.hold(1)

    assert server.process is not None
    server.process.kill()
    await server.process.wait()
    await until(lambda: not bus.client.is_connected, "the connection breaks")
    hands.puller.grant(1)  # while nobody listens
    await server.start()
    await until(lambda: bus.reconnects == 1, "the connection comes back")
    await issue(bus, 12, first=1)

    await hands.hold(5)
    await settled(bus)
    assert len(set(hands.sequences)) <= 5
    assert len(hands.got) == 5
    await hands.puller.close()


async def test_an_expired_request_is_asked_again(bus: Bus, monkeypatch):
    monkeypatch.setattr("asyncrl.bus.pull._EXPIRES_S", 0.2)
    hands = Hands(bus)
    await hands.puller.start(2)
    await asyncio.sleep(0.5)

    await issue(bus, 5)

    await hands.hold(2)
    await settled(bus)
    assert len(hands.got) == 2
    await hands.puller.close()


async def test_a_closed_puller_may_be_closed_again_and_receives_nothing(bus: Bus):
    hands = Hands(bus)
    await hands.puller.start(2)
    await hands.puller.close()
    await hands.puller.close()

    await issue(bus, 2)
    await settled(bus)

    assert hands.got == []


async def test_work_of_a_worker_that_died_comes_to_another_after_its_lease(bus: Bus, connect: Connect):
    dying = await connect(bus.run)
    first, second = Hands(dying), Hands(bus)
    await issue(bus, 3)
    await first.puller.start(3)
    await first.hold(3)

    await dying.client.close()
    await second.puller.start(3)

    await second.hold(3)
    assert sorted(second.sequences) == [1, 2, 3]
    assert [position(message.reply).deliveries for message in second.got] == [2, 2, 2]
    await second.puller.close()


async def test_work_whose_lease_is_renewed_stays_and_work_given_back_passes_on_at_once(bus: Bus, connect: Connect):
    await make_queue(bus, QUEUES["rollout"], 0.6)
    other = await connect(bus.run)
    first, second = Hands(bus), Hands(other)
    await issue(bus, 2)
    await first.puller.start(2)
    await first.hold(2)
    await second.puller.start(2)

    await bus.send(first.got[1].reply, b"-NAK")
    await second.hold(1)
    assert second.sequences == first.sequences[1:]
    await bus.request(second.got[0].reply, b"+ACK")
    for _ in range(6):  # three times the lease
        await bus.send(first.got[0].reply, b"+WPI")
        await asyncio.sleep(0.3)

    assert len(second.got) == 1
    await second.hold(2)  # nobody renews it any more
    assert second.sequences[1] == first.sequences[0]
    await first.puller.close()
    await second.puller.close()


async def test_acknowledged_work_never_comes_again(bus: Bus):
    hands = Hands(bus)
    await issue(bus, 2)
    await hands.puller.start(10)
    await hands.hold(2)
    for message in hands.got:
        await bus.request(message.reply, b"+ACK")

    await asyncio.sleep(LEASE_S * 1.2)

    assert len(hands.got) == 2
    state = (await queue_states(bus))["rollout"]
    assert (state["waiting"], state["under_way"]) == (0, 0)
    await hands.puller.close()


async def say_lives(bus: Bus, count: int, first: int = 0) -> None:
    """Odd sequences start, even ones stop."""
    for number in range(first, first + count):
        topic = ACTOR_STOPPED if number % 2 else ACTOR_STARTED
        await bus.store(topic.subject(bus.run, f"a-{number}"), b"body", {"number": str(number)})


async def read_log(bus: Bus, **options) -> list[Record]:
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append, **options)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 10)
    await reader.close()
    return records


async def test_a_log_is_read_in_order_from_its_beginning(bus: Bus):
    await say_lives(bus, 30)

    records = await read_log(bus)

    assert [record.sequence for record in records] == list(range(1, 31))
    assert [record.headers["number"] for record in records] == [str(number) for number in range(30)]
    assert all(record.time_ns > 0 and record.data == b"body" for record in records)


async def test_a_log_is_read_after_a_sequence(bus: Bus):
    await say_lives(bus, 10)

    assert [record.sequence for record in await read_log(bus, after=7)] == [8, 9, 10]
    assert await read_log(bus, after=10) == []


async def test_a_log_is_read_by_subject_and_by_headers_alone(bus: Bus):
    await say_lives(bus, 6)

    records = await read_log(bus, subjects=[ACTOR_STOPPED.pattern(bus.run)], headers_only=True)

    assert [record.sequence for record in records] == [2, 4, 6]
    assert [record.headers["number"] for record in records] == ["1", "3", "5"]
    assert {record.data for record in records} == {b""}


async def test_an_empty_log_is_caught_up_at_once_and_followed_from_then_on(bus: Bus):
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append)
    await reader.start()
    assert reader.caught_up.is_set()

    await say_lives(bus, 3)

    await until(lambda: len(records) == 3, "three records are followed")
    await reader.close()


async def consumers(bus: Bus) -> list[str]:
    names: list[str] = (await bus.api(f"CONSUMER.NAMES.{ACTORS.full_name(bus.run)}"))["consumers"] or []
    return names


async def test_a_reader_whose_consumer_is_deleted_goes_on_where_it_was(bus: Bus):
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append)
    await reader.start()
    await say_lives(bus, 5)
    await until(lambda: len(records) == 5, "the first half is read")

    for name in await consumers(bus):
        await bus.api(f"CONSUMER.DELETE.{ACTORS.full_name(bus.run)}.{name}")
    await say_lives(bus, 5, first=5)

    await until(lambda: len(records) == 10, "the second half is read")
    assert [record.sequence for record in records] == list(range(1, 11))
    await reader.close()


async def test_a_closed_reader_leaves_no_consumer_behind(bus: Bus):
    await say_lives(bus, 3)
    await read_log(bus)

    await until(lambda: no_consumers(bus), "the consumer is gone")


async def no_consumers(bus: Bus) -> bool:
    return await consumers(bus) == []


async def test_a_reader_reads_a_log_longer_than_its_window(bus: Bus):
    subject = ACTOR_STARTED.subject(bus.run, "a")
    await asyncio.gather(*(bus.store(subject, b"", {}) for _ in range(3000)))

    assert [record.sequence for record in await read_log(bus)] == list(range(1, 3001))


async def test_an_idle_reader_keeps_its_consumer(bus: Bus):
    reader = LogReader(bus, ACTORS, lambda record: None)
    await reader.start()
    [before] = await consumers(bus)

    await asyncio.sleep(1.3)  # the puller's watch has looked at least once

    assert await consumers(bus) == [before]
    await reader.close()


async def test_what_a_fold_raises_is_not_lost(bus: Bus):
    faults: list[Exception] = []
    bus.on_fault = faults.append

    def refuse(record: Record) -> None:
        raise AttributeError(f"record {record.sequence} is not what I thought")

    reader = LogReader(bus, ACTORS, refuse)
    await reader.start()
    await say_lives(bus, 1)

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
    monkeypatch.setattr("asyncrl.bus.log._LOOK_S", 0.01)
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
