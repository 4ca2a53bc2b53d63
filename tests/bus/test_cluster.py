"""Three servers on one machine: one dies, and every acknowledged message, reader and writer outlives it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.layout import StreamLayout
from asyncrl.bus.log import LogReader, Record, read_last, read_message, read_newest
from asyncrl.bus.provision import equal_sizes, provision, settled
from asyncrl.bus.publish import publish
from asyncrl.bus.server import SERVERS, EmbeddedCluster, EmbeddedServer
from asyncrl.config.settings import Config
from harness.keepers import Counting, log_of
from harness.stage import Stage, until
from topics.actors import STOP_REQUESTED, StopRequested
from topics.topic import ACTORS, FLEET, Stream
from topics.wire import decode

LIMIT_S = 300.0  # three servers and their clients on a loaded machine


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(tmp_path / "servers")
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def bus(cluster: EmbeddedCluster) -> AsyncIterator[Bus]:
    bus = await Bus.connect(cluster.address, "c", deadline_s=LIMIT_S, publish_deadline_s=LIMIT_S)
    await provision(bus, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=1.0, layout=StreamLayout(replicas=SERVERS))
    await settled(bus)
    yield bus
    await bus.close()


async def kill_leader(cluster: EmbeddedCluster, bus: Bus, stream: Stream) -> EmbeddedServer:
    """End the server that leads a stream, as a crash would."""
    info = await bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}")
    node = cluster.nodes[int(info["cluster"]["leader"].removeprefix("nats-")) - 1]
    node.kill()
    await node.ended()
    return node


async def test_nothing_acknowledged_is_lost_and_nothing_is_there_twice_when_leaders_die(
    cluster: EmbeddedCluster, bus: Bus
):
    received: list[Record] = []
    reader = LogReader(bus, ACTORS, received.append)
    await reader.start()
    output: list[int] = []

    async def talk() -> None:
        while True:
            number = len(output)
            output.append(await publish(bus, StopRequested(f"reason {number}")))
            await asyncio.sleep(0.01)

    talking = asyncio.create_task(talk())
    for _ in range(2):
        await until(lambda: len(received) > 20, "messages are read", LIMIT_S)
        node = await kill_leader(cluster, bus, ACTORS)
        before = len(output)
        await until(lambda before=before: len(output) > before + 20, "messages are stored without that server", LIMIT_S)
        await node.start()
        await settled(bus)
        received_before = len(received)
        await until(lambda at=received_before: len(received) > at, "the reader goes on", LIMIT_S)
    talking.cancel()
    await until(lambda: bool(received) and received[-1].sequence >= output[-1], "the reader has them all", LIMIT_S)
    await reader.close()

    reasons = [decode(StopRequested, record.data).reason for record in received]
    assert reasons[: len(output)] == [f"reason {number}" for number in range(len(output))]
    assert [record.sequence for record in received] == sorted({record.sequence for record in received})


class LosingHop:
    """A proxy before a server that loses the next message which it delivers, and keeps the connection."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._loses = False
        self.lost = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def lose_one(self) -> None:
        self._loses = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(self._pass(reader, back, loses=False), self._pass(there, writer, loses=True))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, loses: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if loses and self._loses and b"$JS.ACK." in data:  # the subject that a delivered message is answered to
                    self._loses, self.lost = False, self.lost + 1
                    continue
                target.write(data)
        target.close()


async def test_a_reader_finds_a_last_message_that_was_lost_between_servers(cluster: EmbeddedCluster, bus: Bus):
    hop = LosingHop(cluster.nodes[0].address.url)
    async with hop.open() as url:
        address = msgspec.structs.replace(cluster.address, url=url)
        other = await Bus.connect(address, bus.run, deadline_s=LIMIT_S, publish_deadline_s=LIMIT_S)
        try:
            received: list[Record] = []
            reader = LogReader(other, ACTORS, received.append)
            await reader.start()
            await publish(bus, StopRequested("first"))
            await until(lambda: len(received) == 1, "the first message is read", LIMIT_S)
            hop.lose_one()
            await publish(bus, StopRequested("second"))
            await until(lambda: hop.lost == 1, "the second message is lost", LIMIT_S)
            await until(lambda: len(received) == 2, "it is read again, though none follows it", 60.0)
            await reader.close()
        finally:
            await other.close()

    assert [decode(StopRequested, record.data).reason for record in received] == ["first", "second"]
    assert other.reconnects == 0


async def test_a_writer_reads_what_it_has_just_written_from_whoever_it_is_connected_to(
    cluster: EmbeddedCluster, bus: Bus
):
    for number in range(30):
        sequence = await publish(bus, StopRequested(f"reason {number}"))
        by_sequence = await read_message(bus, ACTORS, sequence)
        newest = await read_last(bus, STOP_REQUESTED)
        assert by_sequence == newest
        assert newest is not None
        assert decode(StopRequested, newest.data).reason == f"reason {number}"
    assert await read_message(bus, ACTORS, 1000, stored=False) is None
    assert await read_newest(bus, FLEET) is None


async def test_a_stored_message_is_awaited_from_a_leader_that_has_not_applied_it_yet(
    cluster: EmbeddedCluster, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    first = await publish(bus, StopRequested("first"))
    asked = asyncio.Event()
    api = Bus.api

    async def observed(self: Bus, subject: str, *rest: object) -> dict[str, object]:
        answer = await api(self, subject, *rest)
        if subject.startswith("STREAM.INFO."):
            asked.set()
        return answer

    monkeypatch.setattr(Bus, "api", observed)
    reading = asyncio.create_task(read_message(bus, ACTORS, first + 1))
    async with asyncio.timeout(LIMIT_S):
        await asked.wait()  # the log was found to end before it
        assert await publish(bus, StopRequested("second")) == first + 1
        record = await reading
    assert record is not None
    assert decode(StopRequested, record.data).reason == "second"


async def test_a_keeper_appends_several_decisions_at_once_and_goes_on_when_its_leader_dies(
    cluster: EmbeddedCluster, bus: Bus, tmp_path: Path
):
    config = msgspec.convert({"run": bus.run}, Config)
    context = Stage(tmp_path / "run", cluster, config).context("supervisor", bus)
    counting = Counting(context)
    await counting.keeper.start()
    assert await counting.keeper.append([counting.fold.next(), counting.fold.next()])

    killing = asyncio.create_task(kill_leader(cluster, bus, FLEET))
    async with asyncio.timeout(LIMIT_S):
        await counting.count_to(40)
    await killing

    context.stop.set()
    await counting.keeper.close()
    assert context.faults == []
    output = [number for name, number, _ in await log_of(bus) if name == "fleet.scaled"]
    assert output == [1, 1, *range(2, 41)]  # the first two were decided at once, on purpose
