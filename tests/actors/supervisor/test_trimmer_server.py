"""The trimmer on a server: what goes from the streams, what it says, and what stays."""

import asyncio

import numpy as np
import pytest

from actors.supervisor.trimmer import Trimmer
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.log import read_message
from asyncrl.bus.progress import publish_progress
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import body_of
from asyncrl.bus.pull import Puller, position
from asyncrl.bus.routing import Cut, Whole, read_routing, store_routing
from harness.stage import DEADLINE_S, until
from harness.stories import result
from harness.trimming import Owner, announce, keeping, trimming
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.payload_refs import Experts
from topics.prompts import PromptIssued, PromptRow
from topics.streams import (
    ADMISSION_PAUSED,
    ADMISSION_RESUMED,
    CHECKPOINT_REQUESTED,
    STREAM_TRIMMED,
    STREAM_TRIMMING,
)
from topics.topic import BLOBS, TRAJECTORIES
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    Answer,
    ProgressEntry,
    Reference,
    TrajectoryGenerated,
    TrajectoryProgressed,
)
from topics.weights import CheckpointSaved
from topics.wire import decode


async def grade(bus, count):
    """Acknowledge as many results as reward workers would, in the order of the stream."""
    done = asyncio.Event()
    seen = set()

    def take(message):
        seen.add(position(message.reply).stream_sequence)
        asyncio.get_running_loop().create_task(bus.send(message.reply, b"+ACK"))
        if len(seen) == count:
            done.set()

    puller = Puller(bus, f"{TRAJECTORIES.full_name(bus.run)}.reward", take)
    await puller.start(count)
    async with asyncio.timeout(120):
        await done.wait()
    await puller.close()


async def issue(bus, *names):
    for name in names:
        prompt_id, member = name.split("-")
        await announce(bus, PromptIssued(prompt_id, int(member), 2, [PromptRow("x")]))


async def test_messages_go_with_their_blobs_once_checkpoints_have_them_and_no_reward_worker_needs_them(bus, stage):
    names = [f"p00000{prompt}-{member}" for prompt in range(3) for member in range(2)]
    await issue(bus, *names)
    results = {name: result(name, (0,) * 80_000) for name in names}
    for message in results.values():
        message.routing = await store_routing(bus, message, [np.ones((80_000, 4), np.uint8)], Cut([0, 1, 2], 1))
    at = {name: await announce(bus, message) for name, message in results.items()}
    for step in (1, 2):
        pair = names[2 * step - 2 : 2 * step]
        members = [BatchMember(name, 0, Reference(at[name], "00", 1), 1.0, 3) for name in pair]
        await announce(bus, BatchPacked(step, "rl", [BatchGroup(f"p00000{step - 1}", members)], 0))
    for step in (1, 2, 3):
        await announce(bus, CheckpointSaved(0, step, "00", f"/there/step00000{step}-lineage0-00", 1))
    records = {name: await read_message(bus, TRAJECTORIES, at[name]) for name in names}
    assert (await stream_states(bus))["BLOBS"]["messages"] == (2 + 2) * len(names)  # tokens, and their experts

    await grade(bus, 2)
    async with trimming(stage(), bus) as owner:

        def below():
            return [message.below for topic, message in owner.messages if topic is STREAM_TRIMMED]

        await until(lambda: below() == [at["p000001-0"]], "what is graded is trimmed")
        await grade(bus, 4)
        await announce(bus, CheckpointSaved(0, 4, "00", "/there/step000004-lineage0-00", 1))
        await until(lambda: below()[1:] == [at["p000002-0"]], "what is trained is trimmed, and nothing else")

    output = [message for topic, message in owner.messages if topic is STREAM_TRIMMED]
    assert [(trim.messages, trim.chunks) for trim in output] == [(2, 8), (2, 8)]
    assert sum(trim.bytes for trim in output) > 4 * 80_000 * 13
    states = await stream_states(bus)
    assert (states["TRAJECTORIES"]["first_seq"], states["BLOBS"]["messages"]) == (at["p000002-0"], 8)
    assert decode(TrajectoryGenerated, await body_of(bus, records["p000002-1"])).trajectory_id == "p000002-1"
    await read_routing(bus, results["p000002-1"], Whole())
    with pytest.raises(BlobMissing):
        await body_of(bus, records["p000000-0"])
    with pytest.raises(BlobMissing):
        await read_routing(bus, results["p000000-0"], Whole())


async def narrow(bus):
    """Leave 4 MB of room for tokens."""
    info = await bus.api(f"STREAM.INFO.{TRAJECTORIES.full_name(bus.run)}")
    await bus.api(f"STREAM.UPDATE.{TRAJECTORIES.full_name(bus.run)}", {**info["config"], "max_bytes": 4_000_000})


async def hold(bus, name, log, **fields):
    message = TrajectoryProgressed(trajectory_id=name, log=log, **fields)
    return await announce(bus, message)


async def store_progress(bus, log, name, *, tokens):
    sampled = np.arange(tokens, dtype=np.int32)
    answer = Answer("generate", "00", False, tokens=sampled, logprobs=sampled.astype(np.float32), versions=sampled)
    answer.routing = Experts(4, rows=bytes(4 * tokens))
    return await publish_progress(bus, log, [ProgressEntry(trajectory_id=name, offset=tokens, journal={"0": answer})])


async def test_where_room_is_short_progress_that_nothing_continues_goes_and_a_checkpoint_is_asked_for(bus, stage):
    """The logs of workers long dead fill the stream; of the one that an open trajectory continues nothing goes."""
    await narrow(bus)
    await issue(bus, "p000000-0", "p000001-0")
    for name, log in (("p000000-0", "rollout-1-dead"), ("p000001-0", "rollout-2-living")):
        await hold(bus, name, log)
    for number in range(8):
        await store_progress(bus, "rollout-1-dead", "p000000-0", tokens=40_000 - number)
    needed = [await store_progress(bus, "rollout-2-living", "p000001-0", tokens=9)]
    needed.append(await hold(bus, "p000000-0", "rollout-2-living", before=[]))
    async with trimming(stage(), bus) as owner:
        await until(lambda: STREAM_TRIMMED in owner.topics, "progress is trimmed")
        assert (await stream_states(bus))["TRAJECTORIES"]["messages"] == 3
        assert all([await read_message(bus, TRAJECTORIES, sequence) for sequence in needed])
        assert (await stream_states(bus))["BLOBS"]["messages"] == 1  # experts of what is left

        heavy = [f"p00000{number}-0" for number in range(2, 8)]
        await issue(bus, *heavy)
        for name in heavy:
            await announce(bus, result(name, (0,) * 50_000))
        await until(lambda: ADMISSION_PAUSED in owner.topics, "admission is paused")
        assert CHECKPOINT_REQUESTED in owner.topics
        await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(bus.run)}", {"keep": 1})
        await until(lambda: ADMISSION_RESUMED in owner.topics, "admission is resumed")
    assert (await stream_states(bus, [BLOBS]))["BLOBS"]["messages"] == 1


@pytest.mark.parametrize("packed", [1, 2])
async def test_in_a_full_stream_one_checkpoint_is_enough_if_it_contains_every_batch(bus, stage, packed):
    await narrow(bus)
    names = [f"p00000{number}-0" for number in range(6)]
    await issue(bus, *names)
    at = {name: await announce(bus, result(name, (0,) * 50_000)) for name in names}
    for step in range(1, packed + 1):
        members = [BatchMember(names[step - 1], 0, Reference(at[names[step - 1]], "00", 1), 1.0, 3)]
        await announce(bus, BatchPacked(step, "rl", [BatchGroup(f"p00000{step - 1}", members)], 0))
    await grade(bus, len(names))
    await announce(bus, CheckpointSaved(0, 1, "00", "/there/step000001-lineage0-00", 1))

    async with trimming(stage(), bus) as owner:
        await until(lambda: STREAM_TRIMMED in owner.topics or ADMISSION_PAUSED in owner.topics, "the trimmer looked")

    trimmed = [message.below for topic, message in owner.messages if topic is STREAM_TRIMMED]
    assert trimmed == ([at[names[1]]] if packed == 1 else [])


async def test_what_is_no_message_at_all_goes_where_it_takes_the_room_of_open_work(bus, stage):
    await narrow(bus)
    await issue(bus, "p000000-0")
    needed = await hold(bus, "p000000-0", "rollout-1-00")
    for number in range(60):
        await bus.store(TRAJECTORY_GENERATED.subject(bus.run, f"p9{number:05d}-0"), b"x" * 50_000, {"versions": "many"})
    await grade(bus, 60)

    async with trimming(stage(), bus) as owner:
        await until(lambda: STREAM_TRIMMED in owner.topics, "the room is given back")

    state = (await stream_states(bus))["TRAJECTORIES"]
    assert (state["messages"], state["first_seq"]) == (1, needed)


class Died(Exception):
    """The end of a supervisor at a crash point."""


@pytest.mark.parametrize("point", ["trim.announced", "trim.blobs_purged", "trim.purged"])
async def test_a_reader_can_tell_a_purge_from_a_loss_wherever_the_supervisor_dies(bus, stage, monkeypatch, point):
    names = [f"p00000{prompt}-0" for prompt in range(3)]
    await issue(bus, *names)
    at = {name: await announce(bus, result(name, (0,) * 80_000)) for name in names}
    members = [BatchMember(names[0], 0, Reference(at[names[0]], "00", 1), 1.0, 3)]
    await announce(bus, BatchPacked(1, "rl", [BatchGroup("p000000", members)], 0))
    for step in (1, 2):
        await announce(bus, CheckpointSaved(0, step, "00", f"/there/step00000{step}-lineage0-00", 1))
    await grade(bus, 3)
    context, owner = stage().context("supervisor", bus), Owner(stage().config)

    def dies(passed):
        if passed == point:
            raise Died

    async with keeping(context, owner) as keeper:
        with monkeypatch.context() as patched, pytest.raises(Died):
            patched.setattr("actors.supervisor.trimmer.crash_point", dies)
            await asyncio.wait_for(Trimmer(context, keeper, owner).run(), DEADLINE_S)

    [told] = [message for topic, message in owner.messages if topic is STREAM_TRIMMING]
    assert STREAM_TRIMMED not in owner.topics
    assert (told.stream, told.below) == ("TRAJECTORIES", at["p000001-0"])
    gone = [name for name in names if await read_message(bus, TRAJECTORIES, at[name]) is None]
    assert gone == ([names[0]] if point == "trim.purged" else [])
    async with trimming(stage(), bus) as after:  # the next supervisor
        await until(lambda: STREAM_TRIMMED in after.topics or point == "trim.purged", "it trims what is left")
    assert (await stream_states(bus))["TRAJECTORIES"]["first_seq"] == at["p000001-0"]
