"""Publishing: durable, stored once, patient with a server that is away or full, and never silently lost."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.blobs import BLOB, BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone, BusRefused, WrongSequence
from asyncrl.bus.log import LogReader, Record, read_last, read_last_of_each, read_message, read_newest
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import (
    EXPECT_LAST,
    Fenced,
    TwoContents,
    Unpublishable,
    body_of,
    pack,
    publish,
    publish_if_latest,
    read,
)
from asyncrl.bus.server import EmbeddedServer
from harness.examples import unsealed
from harness.stage import DEADLINE_S, Connect, until
from topics.actors import ACTOR_STOPPED, BLOB_KEPT, FLEET_SCALED, ActorStarted, ActorStopped
from topics.topic import ACTORS, FLEET, GRADES, LEDGER_BLOBS, TRAJECTORIES, TURNS, Topic
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    TrajectoryGenerated,
    TrajectoryProgressed,
)
from topics.turns import TurnStarted
from topics.wire import INLINE_BYTES, Message, WireError


def stopped(number: int) -> ActorStopped:
    return ActorStopped("rollout", f"rollout-{number}", "a reason")


async def publish_stopped(bus: Bus, number: int) -> int:
    return await publish(bus, stopped(number))


async def test_what_was_acknowledged_is_there_after_the_server_was_killed(bus: Bus, server: EmbeddedServer):
    sequence = await publish_stopped(bus, 1)

    await kill(server)
    await server.start()

    record = await read_message(bus, ACTORS, sequence)
    assert record is not None
    assert await read(bus, ActorStopped, record) == stopped_as_read(1)


def stopped_as_read(number: int) -> ActorStopped:
    message = stopped(number)
    message.v = message.V
    return message


async def kill(server: EmbeddedServer) -> None:
    assert server.process is not None
    server.process.kill()
    await server.process.wait()


async def test_a_repeated_publish_is_stored_once_and_gets_the_same_sequence(bus: Bus):
    first = await publish_stopped(bus, 1)
    between = await publish_stopped(bus, 2)

    assert await publish_stopped(bus, 1) == first
    assert between == first + 1
    assert (await stream_states(bus))["ACTORS"]["messages"] == 2


async def test_two_contents_under_a_message_id_taken_as_it_is_are_refused_aloud(bus: Bus):
    same = {MESSAGE_ID: "same"}
    await publish(bus, ActorStopped("rollout", "rollout-1", "one"), headers=same)

    with pytest.raises(TwoContents, match=r"same: message 1 has this id and another content"):
        await publish(bus, ActorStopped("rollout", "rollout-1", "two"), headers=same)


async def test_two_contents_are_both_stored_and_each_of_them_once(bus: Bus):
    for text in ("one", "two", "one", "two"):
        await publish(bus, ActorStopped("rollout", "rollout-1", text))

    assert (await stream_states(bus))["ACTORS"]["messages"] == 2


async def test_publishes_and_readers_survive_a_killed_server_without_loss_repeat_or_gap(
    bus: Bus, server: EmbeddedServer
):
    records: list[Record] = []
    reader = LogReader(bus, ACTORS, records.append)
    await reader.start()
    limit = asyncio.Semaphore(64)
    half = asyncio.Event()

    async def publish(number: int) -> int:
        async with limit:
            sequence = await publish_stopped(bus, number)
        if sequence >= 500:
            half.set()
        return sequence

    publishing = asyncio.gather(*(publish(number) for number in range(2000)))
    await asyncio.wait_for(half.wait(), 120)
    await kill(server)
    await server.start()
    sequences = await asyncio.wait_for(publishing, 120)
    await until(lambda: reader.last >= max(sequences), "the reader reaches the end")
    await reader.close()

    assert bus.reconnects == 1
    assert sorted(sequences) == list(range(1, 2001))
    assert [record.sequence for record in records] == list(range(1, 2001))
    assert len({record.subject for record in records}) == 2000


async def limit_bytes(bus: Bus, stream, max_bytes: int) -> None:
    config = (await bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}"))["config"]
    await bus.api(f"STREAM.UPDATE.{config['name']}", {**config, "max_bytes": max_bytes})


async def test_a_publish_into_a_full_stream_waits_until_there_is_room(bus: Bus):
    await limit_bytes(bus, ACTORS, 10_000)
    big = ActorStopped("rollout", "rollout-1", "x" * 8000)
    await publish(bus, big)

    waiting = asyncio.create_task(publish(bus, ActorStopped("rollout", "rollout-1", "y" * 8000)))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await limit_bytes(bus, ACTORS, 100_000)

    assert await asyncio.wait_for(waiting, 120) == 2


async def test_a_publish_into_a_full_stream_fails_at_its_deadline_with_the_reason(
    bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    """That the server gave, though the deadline cuts the last attempt short."""
    impatient = await connect(bus.run, publish_deadline_s=1.0)
    await limit_bytes(bus, ACTORS, 100)
    request, answers = Bus.request, []

    async def answered_once(self: Bus, *words: Any, **options: Any) -> Any:
        if answers:
            raise TimeoutError
        answers.append(await request(self, *words, **options))
        return answers[0]

    monkeypatch.setattr(Bus, "request", answered_once)
    with pytest.raises(BusGone, match=r"actor\.stopped\.rollout-1: maximum bytes exceeded within 1 s"):
        await publish_stopped(impatient, 1)


async def test_a_publish_without_a_server_gives_up_at_its_deadline(bus: Bus, connect: Connect, server: EmbeddedServer):
    impatient = await connect(bus.run, publish_deadline_s=0.3)
    await server.stop()

    with pytest.raises(BusGone, match="no acknowledgement"):
        await publish_stopped(impatient, 1)


async def test_a_subject_that_no_stream_keeps_is_never_taken_for_stored(connect: Connect):
    bus = await connect("never-provisioned", publish_deadline_s=1.0)

    with pytest.raises(BusGone, match="no stream listens to this subject"):
        await publish_stopped(bus, 1)


async def test_a_publish_on_a_closed_connection_names_the_connection(connect: Connect, bus: Bus):
    closed = await connect(bus.run)
    await closed.close()

    with pytest.raises(BusGone, match="the connection is closed"):
        await publish_stopped(closed, 1)


async def test_an_append_at_another_sequence_than_expected_is_refused(bus: Bus):
    await bus.store(FLEET_SCALED.subject(bus.run), b"1", {EXPECT_LAST: "0"})

    for expected in ("0", "2"):
        with pytest.raises(WrongSequence, match="wrong last sequence: 1"):
            await bus.store(FLEET_SCALED.subject(bus.run), b"2", {EXPECT_LAST: expected})
    assert (await bus.store(FLEET_SCALED.subject(bus.run), b"2", {EXPECT_LAST: "1"})).seq == 2


@pytest.mark.parametrize("key", ["", "a.b", "a b", "*", ">", "a\r\nPUB", "x" * 129])
async def test_a_message_whose_key_is_no_part_of_a_subject_is_refused_at_once(bus: Bus, key: str):
    with pytest.raises(Unpublishable) as refused:
        await publish(bus, ActorStarted("rollout", key, "host", 1))

    assert f"actor.started cannot be published: its actor_id is {key[:80]!r}; expected 1 to 128 letters" in str(
        refused.value
    )


class RemarkMade(Message):
    """A message of a user's actor."""

    trajectory_id: str
    reward: float


@pytest.mark.parametrize("reward", ["seven", None, 1j, [], "\ud800", 2**70])
async def test_a_message_of_a_users_actor_that_nobody_could_read_is_refused_at_once(bus: Bus, reward: Any):
    topic = Topic(RemarkMade, GRADES, ["critic"], ["operator"], key="trajectory_id")

    with pytest.raises(Unpublishable, match=r"remark.made cannot be published: "):
        await publish(bus, RemarkMade("p000001-1", reward), topic=topic)


async def test_a_refusal_by_the_server_names_what_was_asked(bus: Bus):
    with pytest.raises(BusRefused, match=r"STREAM\.INFO\.nothing: stream not found \(NATS error 10059\)"):
        await bus.api("STREAM.INFO.nothing")


def progress(name: str, delivery: int) -> TrajectoryProgressed:
    return TrajectoryProgressed(trajectory_id=name, delivery=delivery, offset=delivery, log="rollout-1-00")


async def publish_progress(bus: Bus, delivery: int, expected: int, *, name: str = "p000001-0") -> int:
    return await publish_if_latest(bus, progress(name, delivery), expected)


async def test_of_two_workers_that_race_for_a_trajectory_exactly_one_goes_on(bus: Bus, connect: Connect):
    other = await connect(bus.run)
    names = [f"p{number:06d}-0" for number in range(50)]

    for name in names:
        results = await asyncio.gather(
            publish_progress(bus, 1, 0, name=name), publish_progress(other, 2, 0, name=name), return_exceptions=True
        )
        assert sum(isinstance(result, Fenced) for result in results) == 1
        assert sum(isinstance(result, int) for result in results) == 1
    assert (await stream_states(bus))["TRAJECTORIES"]["messages"] == len(names)


async def test_the_fence_spans_progress_and_result_of_one_trajectory_and_no_other(bus: Bus):
    first = await publish_progress(bus, 1, 0)
    assert await publish_progress(bus, 1, 0, name="p000002-0") == first + 1

    second = await publish_progress(bus, 2, first)
    result: Any = unsealed(TrajectoryGenerated)
    result.trajectory_id = "p000001-0"

    with pytest.raises(Fenced, match="p000001-0: another worker has taken over this work"):
        await publish_if_latest(bus, result, expected=first)
    sequence = await publish_if_latest(bus, result, expected=second)
    newest = await read_newest(bus, TRAJECTORIES, f"asyncrl.{bus.run}.trajectory.*.p000001-0")
    assert newest is not None
    assert (newest.sequence, newest.data) == (sequence, pack(result, TRAJECTORY_GENERATED))


async def test_an_own_message_whose_acknowledgement_was_lost_counts_as_won(bus: Bus):
    sequence = await publish_progress(bus, 1, 0)

    assert await publish_progress(bus, 1, 0) == sequence


async def test_a_message_of_3_mb_travels_in_chunks_and_is_read_whole(bus: Bus):
    big = ActorStopped("rollout", "rollout-1", "x" * 3_000_000)

    sequence = await publish(bus, big)

    record = await read_message(bus, ACTORS, sequence)
    assert record is not None
    assert record.data == b""
    assert re.fullmatch(r"actor_stopped_0_[0-9a-f]{16}:\d+:[0-9a-f]{16}:4", record.headers[BLOB])
    assert (await read(bus, ActorStopped, record)).reason == big.reason
    assert msgpack.unpackb(await body_of(bus, record))["reason"] == big.reason
    assert (await stream_states(bus))["LEDGER_BLOBS"]["messages"] == 4


@pytest.mark.parametrize("size", [INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
async def test_messages_around_the_inline_limit_are_read_whole(bus: Bus, size: int):
    message = ActorStopped("a", "a", "y")
    message.reason *= size - len(pack(message, ACTOR_STOPPED)) - 3  # a long text's length takes four bytes more
    body = pack(message, ACTOR_STOPPED)
    assert abs(len(body) - size) <= 1
    sequence = await publish(bus, message)

    record = await read_message(bus, ACTORS, sequence)

    assert record is not None
    assert (BLOB in record.headers) == (len(body) > INLINE_BYTES)
    assert await body_of(bus, record) == body


async def blob_record(bus: Bus) -> Record:
    sequence = await publish(bus, ActorStopped("a", "a", "x" * 2_000_000))
    record = await read_message(bus, ACTORS, sequence)
    assert record is not None
    return record


async def test_a_blob_with_a_missing_chunk_is_not_read(bus: Bus):
    record = await blob_record(bus)
    blob = record.headers[BLOB].split(":")[0]
    subject = BLOB_KEPT.subject(bus.run, f"{blob}-1")
    await bus.api(f"STREAM.PURGE.{LEDGER_BLOBS.full_name(bus.run)}", {"filter": subject})

    with pytest.raises(BlobMissing, match=f"blob {blob}: chunk 1 of 3 is gone"):
        await read(bus, ActorStopped, record)


async def test_a_blob_with_another_content_than_its_digest_is_not_read(bus: Bus):
    record = await blob_record(bus)
    blob = record.headers[BLOB].split(":")[0]
    await bus.store(BLOB_KEPT.subject(bus.run, f"{blob}-0"), b"x" * INLINE_BYTES, {})

    with pytest.raises(BlobMissing, match="or their digest differs"):
        await read(bus, ActorStopped, record)


@pytest.mark.parametrize("reference", ["", "a:b:c:d", "a:1:c", "a:1:c:1:e"])
async def test_a_forged_blob_reference_is_refused(bus: Bus, reference: str):
    record = Record(ACTORS, 1, ACTOR_STOPPED.subject(bus.run, "a"), {BLOB: reference}, b"", 0)

    with pytest.raises(WireError, match="not a blob reference"):
        await read(bus, ActorStopped, record)


async def test_a_blob_reference_with_absurd_numbers_costs_nothing(bus: Bus):
    record = Record(ACTORS, 1, ACTOR_STOPPED.subject(bus.run, "a"), {BLOB: "a:1:c0:9999999"}, b"", 0)

    with pytest.raises(BlobMissing, match="chunk 0 of"):
        await asyncio.wait_for(read(bus, ActorStopped, record), DEADLINE_S)


async def test_a_message_that_is_not_the_one_its_subject_names_is_refused(bus: Bus):
    sequence = await publish(bus, stopped(1))
    record = await read_message(bus, ACTORS, sequence)
    assert record is not None

    with pytest.raises(WireError, match="its subject names actor_id 'rollout-2', its body 'rollout-1'"):
        await read(bus, ActorStopped, record._replace(subject=ACTOR_STOPPED.subject(bus.run, "rollout-2")))


async def test_a_turn_of_an_older_version_is_read_without_the_header_that_was_added(bus: Bus):
    turn = TurnStarted("t1", "s1", "anna", "chat", tokens=np.arange(3, dtype=np.int32), known=4)
    record = await read_message(bus, TURNS, await publish(bus, turn))
    assert record is not None and record.headers["prompt-tokens"] == "7"
    older = {name: value for name, value in record.headers.items() if name != "prompt-tokens"}
    assert (await read(bus, TurnStarted, record._replace(headers=older))).prompt_tokens == 7
    for wrong in ({**record.headers, "prompt-tokens": "6"}, {**older, "session": "s2"}):
        with pytest.raises(WireError, match=r"its header (prompt-tokens is '6'|session is 's2')"):
            await read(bus, TurnStarted, record._replace(headers=wrong))


async def test_the_newest_message_of_each_subject_is_read_in_one_request(bus: Bus):
    for delivery in (1, 2):
        for number in range(3):
            await publish_progress(bus, delivery, 0 if delivery == 1 else number + 1, name=f"p00000{number}-0")

    records = await read_last_of_each(bus, TRAJECTORIES, [TRAJECTORY_PROGRESSED.pattern(bus.run)])
    assert [record.sequence for record in records] == [4, 5, 6]
    assert [(await read(bus, TrajectoryProgressed, record)).delivery for record in records] == [2, 2, 2]
    assert await read_last_of_each(bus, TRAJECTORIES, [TRAJECTORY_GENERATED.pattern(bus.run)]) == []
    assert await read_last(bus, FLEET_SCALED) is None
    assert await read_message(bus, FLEET, 99) is None


async def test_a_read_waits_for_a_server_that_comes_back(bus: Bus, server: EmbeddedServer):
    sequence = await publish_progress(bus, 1, 0)
    fence = f"asyncrl.{bus.run}.trajectory.*.p000001-0"
    await kill(server)

    reading = asyncio.gather(read_newest(bus, TRAJECTORIES, fence), read_message(bus, TRAJECTORIES, sequence))
    await server.start()
    records = await asyncio.wait_for(reading, 120)

    assert [record.sequence for record in records if record is not None] == [sequence, sequence]


async def test_an_answer_that_comes_late_counts(bus: Bus, server: EmbeddedServer):
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{server.process.pid}/stat")
    await until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T", "the server has stopped")
    assert not await bus.client.answers(0.05)
    server.process.send_signal(signal.SIGCONT)

    sequence = await publish_stopped(bus, 1)

    assert await bus.client.answers(DEADLINE_S)
    assert await read_message(bus, ACTORS, sequence) is not None
    assert bus.reconnects == 0
