"""Places of requests: a tenant that floods the gateway does not keep the others waiting."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from actors.gateway.fair_queue import FairQueue
from asyncrl.live.apis.schema import LiveError

LONG_S = 60.0


class Crowd:
    """Requests that hold a place until they are let go."""

    def __init__(self, most: int, hold_s: float = LONG_S, *, shared: bool = False) -> None:
        self.places = FairQueue(most, hold_s, shared=lambda: shared)
        self.inside: list[str] = []
        self._go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Send requests; a name begins with its tenant's letter."""
        for name in names:
            self.send(name)
            await settled()

    def send(self, name: str) -> None:
        self._go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name))

    async def _hold(self, name: str) -> None:
        async with self.places.hold(name[0]):
            self.inside.append(name)
            await self._go[name].wait()

    async def leave(self, name: str) -> None:
        self._go[name].set()
        await self._tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await settled()

    async def error(self, name: str) -> str:
        with pytest.raises(LiveError) as refused:
            await self._tasks[name]
        assert refused.value.fault == "overloaded"
        return str(refused.value)

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def crowd(most: int, hold_s: float = LONG_S, *, shared: bool = False) -> AsyncIterator[Crowd]:
    made = Crowd(most, hold_s, shared=shared)
    yield made
    made.end()


async def test_a_free_place_goes_to_the_tenant_with_the_fewest_and_then_to_who_has_waited_longest():
    async with crowd(2) as made:
        await made.ask("a1", "a2", "a3", "b1")
        assert made.inside == ["a1", "a2"]
        await made.leave("a1")
        assert made.inside[2:] == ["b1"]
        await made.ask("b2")
        await made.leave("b1")
        assert made.inside[3:] == ["b2"]
        await made.leave("a2")
        assert made.inside[4:] == ["a3"] and made.places.waiting == 0


async def test_a_tenant_leaves_a_place_to_others_where_there_are_any():
    async with crowd(3, shared=True) as made:
        await made.ask("a1", "a2", "a3", "b1", "c1")
        assert made.inside == ["a1", "a2", "b1"]
        await made.leave("b1")
        assert made.inside[3:] == ["c1"]
        await made.leave("c1")
        assert made.inside[4:] == [] and made.places.waiting == 1
        await made.leave("a1")
        assert made.inside[4:] == ["a3"] and made.places.waiting == 0


async def test_where_too_many_wait_the_newest_of_the_largest_crowd_is_refused():
    async with crowd(2) as made:
        await made.ask("a1", "a2", "a3", "a4", "b1")
        assert "2 requests are running and 2 wait" in await made.error("a4")
        await made.leave("a1")
        await made.leave("a2")
        assert made.inside[2:] == ["b1", "a3"]


async def test_who_leaves_the_line_takes_no_place_along():
    async with crowd(1) as made:
        await made.ask("a1", "b1")
        await made.cancel("b1")
        await made.ask("c1")
        await made.leave("a1")
        assert made.inside == ["a1", "c1"]
        await made.ask("d1")
        made._go["c1"].set()
        await asyncio.sleep(0)  # the place is given to one
        await made.cancel("d1")  # who goes before knowing of it
        await made.ask("e1")
        assert made.inside[-1] == "e1"


async def test_who_has_just_gone_is_not_refused_again():
    async with crowd(1) as made:
        await made.ask("a1", "a2")
        made.send("b1")
        await made.cancel("a2")
        await made.leave("a1")
        assert made.inside == ["a1", "b1"]


async def test_who_is_gone_takes_no_place():
    async with crowd(1) as made:
        gone = asyncio.Future[None]()
        gone.set_result(None)
        with pytest.raises(ConnectionResetError):
            async with made.places.hold("a", gone):
                raise AssertionError("it has a place")
        await made.ask("a1")
        assert made.inside == ["a1"]


async def test_a_request_that_waits_too_long_is_refused():
    async with crowd(1, hold_s=0.01) as made:
        await made.ask("a1", "b1")
        assert "have been running for 0.01 s" in await made.error("b1")
        assert made.places.waiting == 0
