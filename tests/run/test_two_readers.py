"""Two commands that read the topics of one run that is over, at once: the server of both outlasts the first."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import last_sequence
from asyncrl.bus.server import EmbeddedServer
from asyncrl.run import connect
from asyncrl.run.connect import FoundRun, opened
from asyncrl.run.directory import reader_of
from harness.stage import provision_leased
from topics.topic import ACTORS

LIMIT_S = 120


@pytest.fixture
async def found(tmp_path: Path) -> FoundRun:
    """A run that is over."""
    server = EmbeddedServer(tmp_path)
    bus = await Bus.connect(await server.start(), "demo")
    await provision_leased(bus, 1)
    await bus.close()
    await server.stop()
    return FoundRun("demo", tmp_path)


class Reading:
    """A command that reads until it is let go."""

    def __init__(self, found: FoundRun) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.done = asyncio.create_task(self._read(found))

    async def _read(self, found: FoundRun) -> int:
        async with opened(found, "test") as bus:
            self.begun.set()
            await self.go_on.wait()
            return await last_sequence(bus, ACTORS)


def noted_waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set once a lock is not to be had."""
    waits, try_lock = asyncio.Event(), connect.try_lock

    def noted(handle: int, *, shared: bool = False) -> bool:
        locked = try_lock(handle, shared=shared)
        if not locked:
            waits.set()
        return locked

    monkeypatch.setattr(connect, "try_lock", noted)
    return waits


async def test_the_one_that_started_it_stops_it_behind_the_other(found: FoundRun, monkeypatch: pytest.MonkeyPatch):
    assert found.root is not None

    async with asyncio.timeout(LIMIT_S):
        first = Reading(found)
        await first.begun.wait()
        second = Reading(found)
        await second.begun.wait()
        waits = noted_waits(monkeypatch)
        first.go_on.set()
        await waits.wait()
        second.go_on.set()
        assert [await first.done, await second.done] == [0, 0]
        assert not reader_of(found.root)
        third = Reading(found)
        third.go_on.set()
        assert await third.done == 0


async def test_any_number_of_them_at_once_come_to_their_end(found: FoundRun):
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            several = [Reading(found) for _ in range(3)]
            for one in several:
                one.go_on.set()
            assert await asyncio.gather(*(one.done for one in several), return_exceptions=True) == [0] * 3


async def test_one_that_is_interrupted_while_it_waits_for_the_other_stops_the_server(
    found: FoundRun, monkeypatch: pytest.MonkeyPatch
):
    stopped, stop = asyncio.Event(), EmbeddedServer.stop

    async def noted(server: EmbeddedServer) -> None:
        await stop(server)
        stopped.set()

    monkeypatch.setattr(EmbeddedServer, "stop", noted)
    async with asyncio.timeout(LIMIT_S):
        first = Reading(found)
        await first.begun.wait()
        second = Reading(found)
        await second.begun.wait()
        waits = noted_waits(monkeypatch)
        first.go_on.set()
        await waits.wait()
        first.done.cancel()
        await asyncio.wait({first.done})
        assert first.done.cancelled()
        assert stopped.is_set()
        second.done.cancel()
        await asyncio.wait({second.done})
