"""Three servers on one machine: one dies, and every acknowledged message, reader and writer outlives it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.bus.connection import Bus
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
    await provision(bus, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=1.0, copies=SERVERS)
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
