"""Starts of processes, a few at a time."""

import asyncio

import pytest

from actors.supervisor.starts import Starts


async def test_those_that_had_worked_go_first_and_a_turn_of_one_that_was_cancelled_passes_on():
    starts, order = Starts(1), []

    async def begin(name: str, *, again: bool = False) -> None:
        async with starts.turn(again=again):
            order.append(name)

    async with starts.turn(again=False):
        waiting = [asyncio.create_task(begin(name)) for name in ("new", "cancelled before")]
        waiting += [asyncio.create_task(begin(name, again=True)) for name in ("cancelled with it", "again")]
        await asyncio.sleep(0)
        waiting[1].cancel()
    waiting[2].cancel()  # the turn is its own now, and it has not run yet
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*waiting, return_exceptions=True)

    assert order == ["again", "new"]
    assert [type(error) for error in ended] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]
    async with asyncio.timeout(60):
        await begin("the next")


async def test_a_start_that_fails_gives_its_turn_back():
    starts = Starts(1)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            async with asyncio.timeout(60), starts.turn(again=True):
                raise OSError("no memory")
