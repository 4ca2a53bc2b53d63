"""Blob streams stay small: old snapshots' blobs and chunks without a message go, and what anybody needs stays."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.supervisor.sweeper import purge
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.blobs import BLOB, CHUNKS
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_last
from asyncrl.bus.progress import publish_progress
from asyncrl.bus.provision import equal_sizes, provision, stream_states
from asyncrl.bus.publish import EXPECT_LAST, WRITER, body_of, check_beside, publish
from asyncrl.bus.routing import Cut, store_routing
from asyncrl.bus.server import EmbeddedServer
from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.process import python
from harness.audited import audited_clean, topics_left_by
from harness.disks import leave_free, small_disk
from harness.folds import failure
from harness.runs import up
from harness.stage import Stage, until
from harness.stories import result
from harness.trimming import announce, trimming
from topics.actors import KeeperSnapshot
from topics.batches import BATCH_PACKED, BatchGroup, BatchMember, BatchPacked
from topics.payload_refs import Experts
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.table import BY_NAME
from topics.topic import BATCHES, BLOBS, LEDGER_BLOBS, TRAJECTORIES, Stream, Topic
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    Answer,
    ProgressEntry,
    ProgressStored,
    Reference,
)
from topics.wire import encode

SNAPSHOT = BY_NAME["buffer.snapshot"]


async def test_what_a_full_disk_does_not_let_purge_goes_once_there_is_room(tmp_path: Path):
    with small_disk(tmp_path / "disk", 24):
        server = EmbeddedServer(tmp_path / "disk" / "run", "a-run")
        bus = await Bus.connect(await server.start(), "a-run")
        try:
            await provision(bus, equal_sizes(payload_mb=16, ledger_mb=1), lease_s=5)
            for number in range(400):  # in one file, which the server writes anew without those that go
                await publish(bus, result(f"p{number:06d}-0", [0] * 300))
            leave_free(tmp_path / "disk", 0)

            purging = asyncio.create_task(purge(bus, TRAJECTORIES, [{"seq": 201}]))
            await until(lambda: server.refuses_writes, "the server could not purge them")
            await stream_states(bus)  # its answer has come
            assert not purging.done()
            (tmp_path / "disk" / "filler").unlink()
            server.kill()  # as `asyncrl up` does with a server that has failed to write
            await server.ended()
            await server.start()
            await purging

            assert (await stream_states(bus, [TRAJECTORIES]))[TRAJECTORIES.name]["first_seq"] == 201
        finally:
            await bus.close()
            await server.stop()


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.bus.blobs.INLINE_BYTES", 100)


async def chunks_in(bus: Bus, stream: Stream) -> int:
    return int((await stream_states(bus, [stream]))[stream.name]["messages"])


async def is_empty(bus: Bus, stream: Stream) -> bool:
    return await chunks_in(bus, stream) == 0


async def snapshot(bus: Bus) -> Record:
    """The newest snapshot of the buffer, after one more."""
    last = (await stream_states(bus, [BATCHES]))["BATCHES"]["last_seq"]
    headers = {WRITER: "test", EXPECT_LAST: str(last)}
    await publish(bus, KeeperSnapshot("format", {}, secrets.token_bytes(250)), topic=SNAPSHOT, headers=headers)
    newest = await read_last(bus, SNAPSHOT)
    assert newest is not None
    return newest


@pytest.mark.usefixtures("small_messages")
async def test_the_blobs_of_the_newest_two_snapshots_stay(bus: Bus, stage: Callable[..., Stage]):
    old = [await snapshot(bus) for _ in range(5)]
    each = await chunks_in(bus, BLOBS) // 5
    assert each >= 3

    async def settled() -> bool:
        return await chunks_in(bus, BLOBS) == 2 * each

    async with trimming(stage(nats={"keep": "run"}), bus):  # tokens stay for the run, snapshots do not
        await until(settled, "those of before its start are purged")
        newest = [await snapshot(bus) for _ in range(20)][-2:]
        await until(settled, "those of meanwhile are purged")

    for record in newest:
        assert len(await body_of(bus, record)) > 250
    assert await read_last(bus, SNAPSHOT) == newest[-1]
    assert old[0].sequence == 1


@pytest.mark.usefixtures("small_messages")
async def test_chunks_without_a_message_go_once_nothing_is_under_way(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.supervisor.sweeper._EVERY_S", {BLOBS: 0.05, LEDGER_BLOBS: 0.05})
    row = PromptIssued("p000000", 0, 2, [PromptRow("x" * 300)])
    at = await announce(bus, row)
    at = await announce(bus, result("p000000-0", (0,) * 90))
    members = [BatchMember("p000000-0", 0, Reference(at, "00", 1), 1.0, 90)]
    await announce(bus, BatchPacked(1, "rl", [BatchGroup("p000000", members)], 0))
    folded = await snapshot(bus)
    needed = {stream: await chunks_in(bus, stream) for stream in (BLOBS, LEDGER_BLOBS)}
    assert all(needed.values())
    for stream, blob in (
        (BLOBS, "trajectory_generated_0"),
        (BLOBS, f"buffer_folded_{folded.sequence}"),  # refused: that one came first
        (LEDGER_BLOBS, "batch_packed_1000"),  # never stored
        (BLOBS, "nobodys"),
    ):
        name = f"{blob}_{'0' * 16}"
        for number in range(3):
            await bus.store(CHUNKS[stream].subject(bus.run, f"{name}-{number}"), b"x", {MESSAGE_ID: f"{name}{number}"})

    async def only_needed() -> bool:
        return {stream: await chunks_in(bus, stream) for stream in needed} == needed

    began = asyncio.get_running_loop().time()
    async with trimming(stage(nats={"publish_deadline_s": 0.5}), bus):
        await until(only_needed, "what nothing names is purged, in both streams")
    assert asyncio.get_running_loop().time() > began + 2 * 0.5  # and not before its message could have come

    for topic in (PROMPT_ISSUED, BATCH_PACKED):
        record = await read_last(bus, topic)
        assert record is not None
        assert BLOB in record.headers
        await body_of(bus, record)
    await body_of(bus, folded)


DIES_INSIDE_A_BLOB = """
import asyncio
import sys
from pathlib import Path

import numpy as np

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.progress import publish_progress
from asyncrl.bus.publish import publish
from asyncrl.bus.routing import Cut, store_routing
from asyncrl.crash import set_role
from topics.table import BY_NAME
from topics.wire import decode

async def main(address, run, topic, message):
    set_role("rollout")
    bus = await Bus.connect(BusAddress.read(Path(address)), run)
    message = decode(BY_NAME[topic].message, Path(message).read_bytes())
    if topic == "trajectory.generated":
        message.routing = await store_routing(bus, message, [np.ones((200_000, 4), np.uint8)], Cut([0, 2], 1))
    if topic == "progress.stored":
        await publish_progress(bus, message.log, message.entries)
    else:
        await publish(bus, message)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("topic", "point"),
    [
        (TRAJECTORY_FAILED, "blob.inside"),
        (TRAJECTORY_GENERATED, "blob.inside"),
        (TRAJECTORY_GENERATED, "blob.stored"),  # the experts of a result are, and the result is not
        (PROGRESS_STORED, "blob.stored"),
    ],
)
async def test_chunks_of_a_publisher_killed_before_its_message_go_and_those_of_others_stay(
    bus: Bus,
    stage: Callable[..., Stage],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    topic: Topic[Any],
    point: str,
):
    monkeypatch.setattr("actors.supervisor.sweeper._EVERY_S", {BLOBS: 0.05, LEDGER_BLOBS: 0.05})
    play = stage(nats={"publish_deadline_s": 0.5, "keep": "run"})
    message: Any = result("p000000-0", (0,) * 200_000)
    if topic is TRAJECTORY_FAILED:
        message = failure("p000000-0", size=1, detail="x" * 2_000_000)
    elif topic is PROGRESS_STORED:
        answer = Answer("generate", "", routing=Experts(4, rows=b"x" * 2_000_000))
        message = ProgressStored(
            "rollout-1-a", [ProgressEntry(trajectory_id="p000000-0", offset=0, journal={"0": answer})]
        )
    else:
        message.routing = await store_routing(bus, message, [np.ones((200_000, 4), np.uint8)], Cut([0, 2], 1))
    if topic is PROGRESS_STORED:
        await publish_progress(bus, message.log, message.entries)
    else:
        await publish(bus, message, topic=topic)
    whole = await chunks_in(bus, topic.blobs)
    assert whole > 1
    (tmp_path / "message").write_bytes(encode(message))
    arm(tmp_path / "points", point, "rollout")

    words = [str(play.files.address), bus.run, topic.name, str(tmp_path / "message")]
    environment = {**os.environ, CRASH_FOLDER: str(tmp_path / "points")}
    process = await asyncio.create_subprocess_exec(*python("-c", DIES_INSIDE_A_BLOB, *words), env=environment)
    assert await process.wait() == -signal.SIGKILL
    assert await chunks_in(bus, topic.blobs) > whole

    async def only_whole() -> bool:
        return await chunks_in(bus, topic.blobs) == whole

    async with trimming(play, bus):
        await until(only_whole, "the chunks that no message names are purged")
    record = await read_last(bus, topic)
    assert record is not None
    assert topic is PROGRESS_STORED or await body_of(bus, record) == encode(message)
    await check_beside(bus, record)


BIG = """
run = "short"
task.options = { letters = 4 }
model.create.context = 32
rollout = { group_size = 8, max_new_tokens = 8, slots = 512 }
buffer = { batch_groups = 900, max_lag = 1 }
supervision.snapshot_every = 2000
learner = { trainer = "scripted", steps = 3, checkpoint_every = 2 }
engine = { kind = "scripted", scripted_tokens = 2 }
"""  # a batch.packed of 0.9 MB, and snapshots of the buffer of 2 MB


@pytest.mark.slow
@pytest.mark.nightly
async def test_a_run_of_big_batches_and_many_snapshots_keeps_few_blobs(tmp_path: Path):
    async with up(tmp_path, config=BIG) as run:
        assert await run.ended() == 0, run.story
    async with topics_left_by(run) as bus:
        snapshots = await records_of(bus, BATCHES, SNAPSHOT.pattern(bus.run))
        batches = await records_of(bus, BATCHES, BATCH_PACKED.pattern(bus.run))
        states = await stream_states(bus, [BLOBS, LEDGER_BLOBS])
    sizes = [int(record.headers[BLOB].split(":")[1]) for record in snapshots if BLOB in record.headers]
    assert len(sizes) >= 6, sizes
    assert states["BLOBS"]["bytes"] < 4 * max(sizes)
    assert all(BLOB in record.headers for record in batches)
    assert states["LEDGER_BLOBS"]["bytes"] > 3 * 800_000
    assert states["LEDGER_BLOBS"]["max_bytes"] > states["LEDGER_BLOBS"]["bytes"]
    await audited_clean(tmp_path)


async def records_of(bus: Bus, stream: Stream, subject: str) -> list[Record]:
    records: list[Record] = []
    reader = LogReader(bus, stream, records.append, subjects=[subject], headers_only=True)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    return records
