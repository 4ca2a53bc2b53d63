"""Keepers that count, several on one log, and a clock of theirs that a test sets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

from actors.runtime.actor import Context
from actors.runtime.keeper import NONCE, Keeper
from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import LogReader, Record, last_sequence
from harness.stage import Connect, Stage, until
from topics.actors import KEEPER_TOPICS, FleetScaled, ScaleRequested, StopRequested
from topics.table import BUILT_IN
from topics.topic import FLEET
from topics.wire import Headers

SILENCE_S = 1e6  # no machine stands still for so long
CLAIMED = next(topic for topic in KEEPER_TOPICS if topic.name == "supervisor.claimed")


class Number(Headers):
    """The number that it is."""

    number: int


class Counted(FleetScaled):
    """A number on the keeper's log."""

    HEADERS: ClassVar[type[Headers]] = Number

    @property
    def number(self) -> int:
        return self.wanted["n"]


class Counter(Fold):
    """A fold that counts: each `fleet.scaled` says the number it is, each `scale.requested` asks for one more."""

    def __init__(self) -> None:
        self.value = 0
        self.asked = 0
        self.reasons: list[str] = []

    def _on_scaled(self, scaled: FleetScaled, _record: Record) -> None:
        self.value = scaled.wanted["n"]

    def _on_request(self, request: ScaleRequested, _record: Record) -> None:
        self.asked += request.wanted["n"]

    def _on_stop(self, request: StopRequested, _record: Record) -> None:
        self.reasons.append(request.reason)

    def next(self) -> Counted:
        return Counted({"n": self.value + 1})


class Counting:
    """A keeper that counts, with its fold."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.fold = Counter()
        self.keeper = Keeper(context, FLEET, self.fold)

    async def count_to(self, value: int) -> None:
        while self.fold.value < value and not self.context.stop.is_set():
            await self.keeper.append([self.fold.next()])


Open = Callable[..., Any]


@pytest.fixture
async def opened(connect: Connect, bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Open]:
    """Opens counting keepers on the same log, each with a connection of its own."""
    counting: list[Counting] = []
    stand = stage(supervision={"silence_s": 1.0})

    async def open_one(actor_id: str = "supervisor-1") -> Counting:
        context = stand.context("supervisor", await connect(bus.run, name=actor_id))
        context.actor_id = actor_id
        counting.append(Counting(context))
        return counting[-1]

    yield open_one
    for one in counting:
        one.context.stop.set()
        await one.keeper.close()


async def log_of(bus: Bus) -> list[tuple[str, int, str]]:
    """Everything on the keeper's log: topic, number said, writer."""
    records: list[Record] = []
    reader = LogReader(bus, FLEET, records.append)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    output = []
    for record in records:
        topic = BUILT_IN.topic_of(record.subject)
        assert topic is not None
        number = int(record.headers.get("number", "0"))
        output.append((topic.name, number, record.headers.get(NONCE, "")))
    return output


async def killed(one: Counting) -> None:
    """Leave as a killed process does: without another word."""
    one.context.stop.set()
    await one.keeper.close()
    one.context.tasks.cancel()


class Clock:
    """The clocks of keepers, which the test sets forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self._ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    async def leases_pass(self, standing_by: list[Keeper]) -> None:
        """Let three leases pass, of which the writer's heartbeats renew each before its end."""
        for _ in range(4):
            self._ahead_s += 0.75 * SILENCE_S
            now = self.monotonic()
            await until(lambda at=now: all(one._rival_at >= at for one in standing_by), "a heartbeat is read")

    async def silence(self, gone: Keeper, standing_by: Keeper) -> None:
        """Let a lease pass behind the last that was read of a writer who is gone."""
        assert await gone.context.bus.client.answers(120)  # what it sent has come to the server
        last = await last_sequence(standing_by.context.bus, standing_by.own)
        await until(lambda: standing_by._own_log.last >= last, "all of it is read")
        self._ahead_s += 1.1 * SILENCE_S
        standing_by.wake()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("actors.runtime.keeper.time", clock)
    monkeypatch.setattr("actors.runtime.keeper.HEARTBEAT_S", 0.05)
    return clock
