"""Slots are for programs that work: trajectories that are prepared wait for one in their order, and lose none."""

import asyncio

from actors.rollout.slot_gate import SlotGate


async def test_a_slot_goes_to_the_next_that_is_prepared_and_a_cancelled_one_keeps_none():
    gate, order = SlotGate(1), []
    await gate.take()

    async def work(name: str) -> None:
        await gate.take()
        order.append(name)
        gate.give()

    first, second, third = (asyncio.create_task(work(name)) for name in "abc")
    await asyncio.sleep(0)
    assert gate.vitals()["prepared"] == 3
    gate.give()  # it is handed to the first one
    first.cancel()
    await asyncio.wait({first, second, third})

    assert order == ["b", "c"]
    assert gate.taken == 0


async def test_one_that_is_cancelled_as_a_slot_is_returned_ends_so_and_the_next_one_has_the_slot():
    gate = SlotGate(1)
    await gate.take()
    first, second = (asyncio.create_task(gate.take()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.give()  # before the cancelled one runs again
    await asyncio.wait({first, second})

    assert first.cancelled()
    assert second.exception() is None
    assert gate.taken == 1


async def test_more_slots_are_handed_out_at_once_and_fewer_end_with_their_work():
    gate = SlotGate(1)
    await gate.take()
    waiting = asyncio.create_task(gate.take())
    await asyncio.sleep(0)
    gate.resize(2)
    await waiting
    gate.resize(1)
    late = asyncio.create_task(gate.take())
    await asyncio.sleep(0)
    gate.give()
    await asyncio.sleep(0)
    assert not late.done()
    gate.give()
    await late

    assert gate.taken == 1


async def test_only_slots_that_wait_for_preparations_count_as_unprepared():
    gate = SlotGate(2)
    gate.prepares("a")
    assert gate.vitals()["slots_unprepared"] == 0.0  # none has had a slot: the worker has just begun
    await gate.take()
    await asyncio.sleep(0.05)
    idle = gate.vitals()["slots_unprepared"]
    gate.prepared("a")
    gate.prepared("a")

    assert 0 < idle < 0.01
    assert gate.vitals()["slots_unprepared"] <= idle  # no row is left to be prepared
    assert gate.vitals()["slots_taken_s"] >= 0.05
