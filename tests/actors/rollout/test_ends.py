"""Ends and engines as a rollout worker knows them: bounded, and true from its first piece of work on."""

import tracemalloc
from collections.abc import Callable

import pytest

from actors.rollout.ended import EndedCache
from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.engine.fleet import Wanted
from harness.results import counts, is_done
from harness.stage import Stage, until
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.groups import GroupDropped
from topics.prompts import PromptIssued, PromptRow
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryDropped

BY_BUFFER = {"writer": "test"}


def issued(prompt_id: str, *, attempt: int = 0) -> PromptIssued:
    rows = [PromptRow("^ab=", "ba")]
    return PromptIssued(prompt_id=prompt_id, member=0, group_size=1, rows=rows, attempt=attempt)


def dropped(prompt_id: str, *, attempt: int = 0) -> TrajectoryDropped:
    return TrajectoryDropped(trajectory_id=f"{prompt_id}-0", attempt=attempt, reason="lag", again=True)


def test_an_end_counts_for_its_attempt_and_those_before_and_that_of_a_group_for_all():
    ends = EndedCache()
    ends.add(dropped("p000001", attempt=1), 1)
    ends.add(dropped("p000001", attempt=0), 2)
    ends.add(GroupDropped("p000002", "failed"), 3)

    assert [ends.include(issued("p000001", attempt=number)) for number in range(3)] == [True, True, False]
    assert ends.include(issued("p000002", attempt=9))
    assert not ends.include(issued("p000003"))


@pytest.mark.nightly
def test_the_memory_of_ends_is_flat_over_a_million_of_them():
    ends = EndedCache()
    tracemalloc.start()
    try:
        sizes = []
        for number in range(1_000_000):
            ends.add(GroupDropped(f"p{number:06d}", "failed"), number)
            if number in (200_000, 999_999):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    assert sizes[1] < 1.1 * sizes[0] < 10e6
    assert ends.include(issued("p999999"))
    assert not ends.include(issued("p000000"))


async def test_a_worker_that_starts_does_no_work_that_has_ended_and_all_that_has_not(
    bus: Bus, stage: Callable[..., Stage]
):
    scene = stage(engine={"kind": "scripted"})
    scene.make_model()
    for number in range(3):
        await publish(bus, issued(f"p00000{number}"), headers=BY_BUFFER)
    await publish(bus, dropped("p000000"), headers=BY_BUFFER)
    await publish(bus, GroupDropped("p000001", "failed"), headers=BY_BUFFER)
    await publish(bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))
    await scene.start("rollout")

    await until(lambda: is_done(bus, "rollout"), "the queue is empty")

    assert (await counts(bus, TRAJECTORIES))[TRAJECTORY_GENERATED.name] == 1


async def test_what_was_issued_before_a_forgotten_end_is_looked_up(bus: Bus):
    ends = EndedCache(most=1)
    for number, name in enumerate(("p000000", "p000001")):
        await publish(bus, GroupDropped(name, "failed"), headers=BY_BUFFER)
        ends.add(GroupDropped(name, "failed"), 10 * (number + 1))

    assert [ends.include(issued(name)) for name in ("p000000", "p000001")] == [False, True]
    assert [ends.may_be_incomplete(issued_ns) for issued_ns in (9, 10, 11)] == [True, True, False]
    assert await ends.look_up(bus, issued("p000000"))
    assert not await ends.look_up(bus, issued("p000002"))


async def test_engines_are_known_by_their_newest_messages_at_once(bus: Bus, stage: Callable[..., Stage]):
    for number in range(1, 4):
        name = f"engine-{number}"
        for version in range(3):
            await publish(bus, EngineUpdating(name, 0, version))
            ready = EngineReady(name, f"scripted:{number}", 0, version, "made", 16)
            await publish(bus, ready)
    await publish(bus, EngineUpdating("engine-1", 0, 3))
    await publish(bus, EngineGone("engine-2", "stopped"))
    context: Context = stage(engine={"kind": "scripted"}).context("rollout", bus)
    fleet = open_fleet(context)
    engines = await follow_fleet(context, fleet)

    engine = await fleet.choose(Wanted(2))  # waits for nothing
    fleet.release(engine)
    assert (engine.engine_id, engine.messages) == ("engine-3", 0)

    await publish(bus, EngineReady("engine-1", "scripted:1", 0, 3, "made", 16))
    assert (await fleet.choose(Wanted(3))).engine_id == "engine-1"
    await engines.close()
    await fleet.close()
