"""Keepers: decisions take effect when read back, one writer keeps a log, and no update is lost."""

import asyncio
import re
from typing import Any

import pytest

from actors.runtime.actor import ActorFault
from actors.runtime.keeper import NONCE, Keeper
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import WrongSequence
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import LogReader, Record, read_last
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import EXPECT_LAST, publish
from asyncrl.bus.server import EmbeddedServer
from harness.keepers import Counted, Open, log_of, opened
from harness.stage import DEADLINE_S, Connect, until
from topics.actors import (
    FLEET_SCALED,
    SCALE_REQUESTED,
    FleetScaled,
    ScaleRequested,
    StopRequested,
)
from topics.table import BUILT_IN
from topics.topic import FLEET, Retention, Stream
from topics.trajectories import TrajectoryGenerated

__all__ = ["opened"]  # a fixture


async def letters(bus: Bus) -> int:
    return int((await stream_states(bus))["DEAD"]["messages"])


async def test_a_decision_has_been_folded_when_append_returns(opened: Open):
    one = await opened()
    await one.keeper.start()

    for value in range(1, 6):
        assert await one.keeper.append([one.fold.next()])
        assert one.fold.value == value


async def test_decisions_are_appended_in_order(opened: Open):
    one = await opened()
    await one.keeper.start()
    several = [FleetScaled({"n": value}) for value in range(1, 101)]

    assert await one.keeper.append(several)

    assert one.fold.value == 100


async def test_a_keeper_that_starts_again_knows_everything(opened: Open, bus: Bus):
    first = await opened()
    await first.keeper.start()
    await first.count_to(7)
    await first.keeper.close()

    await publish(bus, ScaleRequested({"n": 3}))
    second = await opened()
    await second.keeper.start()

    assert (second.fold.value, second.fold.asked) == (7, 3)
    assert await second.keeper.append([second.fold.next()])
    assert second.fold.value == 8


async def test_inputs_are_folded_as_they_come_even_when_they_are_large(opened: Open, bus: Bus):
    one = await opened()
    await one.keeper.start()

    await publish(bus, StopRequested("x" * 2_000_000))
    await publish(bus, StopRequested("small, and behind the large one"))

    await until(lambda: len(one.fold.reasons) == 2, "both are folded")
    assert [len(reason) for reason in one.fold.reasons] == [2_000_000, 31]


async def increment(bus: Bus, times: int) -> None:
    """A stranger that counts on the same log by reading its end and appending with compare-and-set."""
    value, last = 0, 0

    def see(record: Record) -> None:
        nonlocal value, last
        last = record.sequence
        if BUILT_IN.topic_of(record.subject) is FLEET_SCALED:
            value = int(record.headers["number"])

    reader = LogReader(bus, FLEET, see)
    await reader.start()
    while times:
        message = Counted({"n": value + 1})
        try:
            sequence = await publish(bus, message, headers={EXPECT_LAST: str(last), NONCE: "stranger"})
        except WrongSequence:
            sequence = last + 1
        else:
            times -= 1
        await until(lambda sequence=sequence: last >= sequence, "the stranger reads on")
        await asyncio.sleep(0)
    await reader.close()


async def test_no_update_is_lost_between_two_writers(opened: Open, bus: Bus, connect: Connect):
    one = await opened()
    await one.keeper.start()
    won = 0
    stranger = asyncio.create_task(increment(await connect(bus.run), 40))
    while won < 40 or (not stranger.done() and won < 500):  # on a loaded machine the other one comes last
        won += await one.keeper.append([one.fold.next()])
    await stranger

    numbers = [number for topic, number, _ in await log_of(bus) if topic == FLEET_SCALED.name]
    assert numbers == list(range(1, 40 + won + 1))


async def test_a_foreign_record_between_decisions_refuses_all_that_follow(opened: Open, bus: Bus, connect: Connect):
    one, other = await opened(), await connect(bus.run)
    await one.keeper.start()
    output = 0
    several = [Counted({"n": value}) for value in range(1, 201)]

    for _ in range(20):
        appending = asyncio.create_task(one.keeper.append(several))
        await publish(other, Counted({"n": 0}), headers={NONCE: "stranger"})
        output += not await appending

    runs: list[list[int]] = [[]]
    for topic, number, writer in await log_of(bus):
        if writer == one.keeper.nonce and topic == FLEET_SCALED.name:
            runs[-1].append(number)
            if number == len(several):
                runs.append([])
        elif runs[-1]:
            runs.append([])
    assert output
    assert all(run == list(range(1, len(run) + 1)) for run in runs)


async def test_facts_are_appended_whatever_others_publish_on_the_log(opened: Open, bus: Bus, connect: Connect):
    one = await opened()
    await one.keeper.start()
    stranger = asyncio.create_task(increment(await connect(bus.run), 40))

    for value in range(100, 120):
        await one.keeper.append_until_stored([Counted({"n": value}) for part in "abc"])
    await stranger

    numbers = [number for _, number, writer in await log_of(bus) if writer == one.keeper.nonce and number]
    assert numbers == [value for value in range(100, 120) for _ in "abc"]


async def test_a_keeper_survives_a_killed_server(opened: Open, server: EmbeddedServer, bus: Bus):
    one = await opened()
    await one.keeper.start()
    counting = asyncio.create_task(one.count_to(300))
    await until(lambda: one.fold.value > 50, "the keeper is at work")

    assert server.process is not None
    server.process.kill()
    await server.process.wait()
    await server.start()
    await asyncio.wait_for(counting, 120)

    assert one.fold.value == 300
    assert not one.context.faults


async def test_a_keeper_claims_a_log_whose_newest_records_have_expired(opened: Open, bus: Bus):
    first = await opened()
    await first.keeper.start()
    await first.count_to(2)
    await first.keeper.close()
    stream = FLEET.full_name(bus.run)
    newest = await read_last(bus, FLEET_SCALED)
    last = int((await stream_states(bus))["FLEET"]["last_seq"])
    assert newest is not None
    for sequence in range(newest.sequence, last + 1):  # heartbeats may stand behind it
        await bus.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})

    second = await opened()
    await asyncio.wait_for(second.keeper.start(), DEADLINE_S)

    assert second.fold.value == 1
    assert await second.keeper.append([second.fold.next()])


async def test_unreadable_records_become_dead_letters_and_the_keeper_goes_on(opened: Open, bus: Bus):
    one = await opened()
    await one.keeper.start()

    await bus.store(SCALE_REQUESTED.subject(bus.run), b"garbage", {"by": "hand"})
    await bus.store(FLEET_SCALED.subject(bus.run), b"\xc1", {})
    await publish(bus, FleetScaled({"other": 1}), headers={NONCE: "stranger"})  # readable, but not what the fold needs
    await publish(bus, ScaleRequested({"n": 2}))

    await until(lambda: one.fold.asked == 2, "what came after them is folded")
    await until(lambda: has_letters(bus, 3), "three dead letters")
    await one.count_to(3)
    assert one.fold.value == 3
    assert one.context.vitals["dead_letters"] == 3


async def test_a_decision_of_its_own_that_cannot_be_read_back_ends_the_keeper_for_good(opened: Open, bus: Bus):
    one = await opened()
    await one.keeper.start()
    before = len(await log_of(bus))

    async with asyncio.timeout(DEADLINE_S):
        while not one.context.stop.is_set():
            await one.keeper.append([FleetScaled({"other": 1})])  # its fold does not take it, and it is decided again

    assert len(await log_of(bus)) <= before + 2
    await until(lambda: has_letters(bus, 1), "its dead letter")
    [fault] = one.context.faults
    assert fault.fatal
    assert re.search(r"message \d+ of log FLEET, .* cannot be read back: KeyError: 'n'", str(fault))


async def has_letters(bus: Bus, count: int) -> bool:
    return await letters(bus) == count


async def test_a_bug_in_a_fold_ends_the_keeper_aloud(opened: Open, bus: Bus):
    one = await opened()
    one.context.bus.on_fault = one.context.fail
    one.fold.apply = lambda topic, message, record: message.nothing_of_that_name
    await one.keeper.start()

    await publish(bus, ScaleRequested({"n": 2}))

    await asyncio.wait_for(one.context.stop.wait(), DEADLINE_S)
    assert "nothing_of_that_name" in str(one.context.faults[0])


class Unkept(Fold):
    """Reads results, which are purged."""

    def _on_generated(self, generated: TrajectoryGenerated, record: Record) -> None: ...


async def test_a_users_keeper_of_what_is_no_log_is_refused_instead_of_never_reading_it(bus: Bus, stage: Any):
    context = stage().context("tally", bus)

    with pytest.raises(ActorFault, match=r"the fold of tally reads trajectory.generated, which is purged once nothing"):
        Keeper(context, Stream("TALLIES", Retention.LEDGER, keeper="tally"), Unkept())
