"""The learner takes the tokens of a batch's members and no others."""

import math
import re

import msgspec
import pytest
import xxhash

from actors.learner.fetching import fetch_trajectories
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import build_rows
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import publish
from harness.stories import result
from topics.batches import BatchGroup, BatchMember, BatchPacked, Objective
from topics.topic import TRAJECTORIES
from topics.trajectories import Reference
from topics.wire import encode


async def stored(bus: Bus, name: str, attempt: int = 0) -> Reference:
    """A result, as a rollout worker stores it and a grade names it."""
    message = result(name, (0, 0), attempt)
    body = encode(message)
    sequence = await publish(bus, message)
    return Reference(sequence, xxhash.xxh3_64_hexdigest(body), len(body))


async def take(bus: Bus, *members: BatchMember) -> list[str]:
    groups = await fetch_trajectories(bus, BatchPacked(3, "rl", [BatchGroup("p000000", list(members))], 0))
    return [trajectory.id for group in groups for trajectory in group.members]


def member(name: str, payload: Reference, attempt: int = 0) -> BatchMember:
    return BatchMember(name, attempt, payload, 1.0, 2)


async def test_hints_of_a_judge_that_was_overruled_do_not_count(bus: Bus):
    message = result("l000000-0", (0, 0))
    hinted = [msgspec.structs.replace(one, hinted=[one.tokens]) for one in message.segments]
    message = msgspec.structs.replace(message, segments=hinted)
    reference = Reference(await publish(bus, message), xxhash.xxh3_64_hexdigest(encode(message)), len(encode(message)))

    for overruled in (False, True):
        named = BatchMember("l000000-0", 0, reference, -1.0, 2, overruled=overruled)
        [group] = await fetch_trajectories(bus, BatchPacked(3, "rl", [BatchGroup("l000000", [named])], 0))
        assert [len(one.hinted) for one in group.members[0].segments] == [0 if overruled else 1 for _ in hinted]
        assert group.members[0].reward == -1.0


async def test_tokens_of_another_trajectory_or_attempt_are_refused(bus: Bus):
    own, others = await stored(bus, "p000000-0"), await stored(bus, "p000009-3")
    again = await stored(bus, "p000000-1", attempt=1)
    assert await take(bus, member("p000000-0", own), member("p000000-1", again, 1)) == ["p000000-0", "p000000-1"]

    for wrong, held in ((member("p000000-1", others), "p000009-3 (attempt 0)"), (member("p000000-1", again), "1)")):
        found = f"batch 3: message {wrong.payload.sequence} holds "
        with pytest.raises(ActorFault, match=re.escape(held)) as caught:
            await take(bus, member("p000000-0", own), wrong)
        assert str(caught.value).startswith(found)
        assert str(caught.value).endswith("the batch names it as p000000-1 (attempt 0)")


async def test_a_trajectory_and_its_tokens_are_in_a_batch_once(bus: Bus):
    own, others = await stored(bus, "p000000-0"), await stored(bus, "p000000-1")
    for second, message in (
        (member("p000000-0", others), "batch 3: p000000-0 is 2 of its members; a batch trains every trajectory once"),
        (member("p000000-1", own), "batch 3: message 1 holds the tokens of 2 members"),
    ):
        with pytest.raises(ActorFault, match=re.escape(message)):
            await take(bus, member("p000000-0", own), second)


async def test_a_member_that_was_purged_since_has_no_tokens_and_changes_no_others(bus: Bus):
    bus.vault.put("s_20260101_1", bytes(32), until_s=math.inf)
    sealed = msgspec.structs.replace(result("p000000-0", (0, 0)), secret="s_20260101_1")
    sequence = await publish(bus, sealed)
    record = await read_message(bus, TRAJECTORIES, sequence)
    own = Reference(sequence, xxhash.xxh3_64_hexdigest(record.data), len(record.data))
    members = member("p000000-0", own), member("p000000-1", await stored(bus, "p000000-1"))
    packed = BatchPacked(3, "rl", [BatchGroup("p000000", list(members))], 0)
    [before] = await fetch_trajectories(bus, packed)
    assert [len(one.segments) for one in before.members] == [1, 1]
    bus.vault.erase(["s_20260101_1"])

    [group] = await fetch_trajectories(bus, packed)

    assert [(len(one.segments), one.elsewhere) for one in group.members] == [(0, 2), (1, 0)]
    rows, stats = build_rows([group], Objective(), step=3, min_version=0)
    assert [row.trajectory_id for row in rows] == ["p000000-1"] and stats.trajectories == 2
