"""Writers of a keeper's log: one takes over from another that is silent, and from nobody else."""

import asyncio
from functools import partial

import pytest

from actors.runtime.actor import ActorDown
from asyncrl.bus.connection import Bus
from harness.keepers import CLAIMED, SILENCE_S, Clock, Counting, Open, clock, killed, log_of, opened
from harness.stage import until

__all__ = ["clock", "opened"]  # fixtures


async def with_lease(opened: Open, actor_id: str = "supervisor-1") -> Counting:
    """A keeper that stands by for as long as the clock says."""
    one: Counting = await opened(actor_id)
    one.context.config.supervision.silence_s = SILENCE_S
    return one


async def test_the_newer_claim_wins_and_the_older_keeper_leaves_without_another_word(opened: Open, bus: Bus):
    older, newer = await opened(), await opened()
    await older.keeper.start()
    counting = asyncio.create_task(older.count_to(10_000))
    await until(lambda: older.fold.value > 10, "the older keeper is at work")

    await newer.keeper.start()
    await asyncio.wait_for(counting, 120)

    assert older.context.stop.is_set()
    assert "another supervisor took over this log" in str(older.context.faults[0])
    value = newer.fold.value
    assert not await older.keeper.append([older.fold.next()])
    assert await newer.keeper.append([newer.fold.next()])
    assert newer.fold.value == value + 1
    output = [(topic, writer) for topic, _, writer in await log_of(bus)]
    claim = output.index((CLAIMED.name, newer.keeper.nonce))
    assert older.keeper.nonce not in [writer for _, writer in output[claim:]]
    assert not newer.context.faults


async def test_of_keepers_that_start_at_the_same_moment_one_is_left(opened: Open):
    several = [await opened() for _ in range(4)]

    results = await asyncio.gather(*(one.keeper.start() for one in several), return_exceptions=True)

    assert [result for result in results if result is not None] == []
    await until(lambda: sum(not one.context.stop.is_set() for one in several) == 1, "one keeper is left")
    [left] = [one for one in several if not one.context.stop.is_set()]
    assert await left.keeper.append([left.fold.next()])


async def test_a_spare_takes_over_when_its_writer_is_silent_and_not_before(opened: Open, clock: Clock):
    writer, spare = await with_lease(opened), await with_lease(opened, "supervisor-2")
    await writer.keeper.start()
    await writer.count_to(3)
    standing_by = asyncio.create_task(spare.keeper.start())
    await until(lambda: spare.fold.value == 3, "the spare folds along")
    await clock.leases_pass([spare.keeper])
    assert not standing_by.done()

    await killed(writer)
    await clock.silence(writer.keeper, spare.keeper)
    await asyncio.wait_for(standing_by, 120)
    await spare.count_to(5)

    assert spare.fold.value == 5
    assert not spare.context.faults


async def claims(bus: Bus) -> int:
    return [topic for topic, *_ in await log_of(bus)].count(CLAIMED.name)


async def test_a_keeper_that_starts_again_stands_by_while_another_writes(opened: Open, bus: Bus, clock: Clock):
    first, spare = await with_lease(opened), await with_lease(opened, "supervisor-2")
    await first.keeper.start()
    taking_over = asyncio.create_task(spare.keeper.start())
    await until(lambda: spare.keeper._rival_at > 0, "the spare stands by")
    await killed(first)
    await clock.silence(first.keeper, spare.keeper)
    await asyncio.wait_for(taking_over, 120)
    await spare.count_to(3)

    again = await with_lease(opened)
    standing_by = asyncio.create_task(again.keeper.start())
    await until(lambda: again.fold.value == 3, "it folds along")
    await clock.leases_pass([again.keeper])

    assert not standing_by.done()
    assert await claims(bus) == 2
    assert not spare.context.faults
    assert await spare.keeper.append([spare.fold.next()])
    await killed(spare)
    await clock.silence(spare.keeper, again.keeper)
    await asyncio.wait_for(standing_by, 120)
    assert await again.keeper.append([again.fold.next()])


async def test_a_keeper_whose_own_earlier_life_wrote_last_waits_for_nobody(opened: Open):
    first, again = await opened(), await with_lease(opened)
    await first.keeper.start()
    await killed(first)

    await asyncio.wait_for(again.keeper.start(), 120)

    assert await again.keeper.append([again.fold.next()])


async def test_of_those_who_stand_by_one_makes_ready_and_claims_when_it_is(opened: Open, bus: Bus, clock: Clock):
    several = [await with_lease(opened, f"supervisor-{number}") for number in range(1, 5)]
    begun, ready = {}, asyncio.Event()

    async def make_ready(one: Counting) -> None:
        begun[one.context.actor_id] = await claims(bus)
        await ready.wait()

    starting = [asyncio.create_task(one.keeper.start(partial(make_ready, one))) for one in several]
    await until(lambda: bool(begun), "one makes ready")
    await clock.leases_pass([one.keeper for one in several if one.context.actor_id not in begun])

    assert not any(task.done() for task in starting)
    assert list(begun.values()) == [0]  # one, and it had not claimed
    assert await claims(bus) == 0
    ready.set()
    done, _ = await asyncio.wait(starting, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert [task.exception() for task in done] == [None]
    assert await claims(bus) == 1
    for one in several:
        await killed(one)
    await asyncio.gather(*starting)


async def test_a_writer_that_comes_back_while_another_makes_ready_stays(opened: Open, bus: Bus, clock: Clock):
    frozen, spare = await with_lease(opened), await with_lease(opened, "supervisor-2")
    await frozen.keeper.start()
    frozen.context.tasks.cancel()  # no heartbeat

    async def wake_up() -> None:
        await frozen.count_to(1)

    starting = asyncio.create_task(spare.keeper.start(wake_up))
    await until(lambda: spare.keeper._rival_at > 0, "the spare stands by")
    await clock.silence(frozen.keeper, spare.keeper)
    with pytest.raises(ActorDown, match="another supervisor writes this log"):
        await starting

    assert await claims(bus) == 1
    await frozen.count_to(2)
    assert not frozen.context.faults
