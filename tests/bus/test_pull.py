"""Pulling work: it is leased, credit is respected, and it is given back."""

import asyncio

from nats.aio.msg import Msg

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import make_queue, queue_states
from asyncrl.bus.pull import Puller, position
from asyncrl.bus.server import EmbeddedServer
from harness.published_messages import issue
from harness.stage import LEASE_S, Connect, until
from topics.table import QUEUES
from topics.topic import PROMPTS


class Hands:
    """A worker's hands: takes what it gets, and does nothing with it."""

    def __init__(self, bus: Bus) -> None:
        self.got: list[Msg] = []
        self.lost: list[str] = []
        stream = PROMPTS.full_name(bus.run)
        self.puller = Puller(bus, f"{stream}.rollout", self.got.append, on_lost=self.lost.append, leased=True)

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
    await until(lambda: bus.reconnects >= 1, "the connection comes back")
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


async def test_work_on_its_way_to_a_puller_that_is_closed_is_given_back(bus: Bus, connect: Connect):
    await make_queue(bus, QUEUES["rollout"], 600)  # no lease ends while this runs
    leaving = await connect(bus.run)
    first, second = Hands(leaving), Hands(bus)
    await first.puller.start(5)
    await until(lambda: open_requests_is(bus, 1), "its request is at the server")
    socket = leaving.client._transport._io_reader._transport
    socket.pause_reading()
    await issue(bus, 5)

    async def on_the_way() -> bool:
        return (await queue_states(bus))["rollout"]["under_way"] == 5

    await until(on_the_way, "the server has sent them")
    closing = asyncio.create_task(first.puller.close())
    await second.puller.start(5)
    socket.resume_reading()
    await closing

    await second.hold(5)
    assert first.got == []
    assert sorted(second.sequences) == [1, 2, 3, 4, 5]
    assert [position(message.reply).num_delivered for message in second.got] == [2] * 5
    await second.puller.close()


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
    assert [position(message.reply).num_delivered for message in second.got] == [2, 2, 2]
    await second.puller.close()


async def test_work_whose_lease_is_renewed_stays_and_work_given_back_passes_on_at_once(bus: Bus, connect: Connect):
    await make_queue(bus, QUEUES["rollout"], 1.5)
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
    for _ in range(15):  # twice the lease
        await bus.send(first.got[0].reply, b"+WPI")
        await asyncio.sleep(0.2)

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
