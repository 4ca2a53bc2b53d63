"""Keepers that count, several on one log."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

from actors.runtime.actor import Context
from actors.runtime.keeper import NONCE, Keeper
from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold, on
from asyncrl.bus.log import LogReader, Record
from harness.stage import Connect, Stage
from topics.actors import KEEPER_TOPICS, FleetScaled, ScaleRequested, StopRequested
from topics.table import topic_of
from topics.topic import FLEET
from topics.wire import Headers

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

    @on(FleetScaled)
    def _on_scaled(self, scaled: FleetScaled, _record: Record) -> None:
        self.value = scaled.wanted["n"]

    @on(ScaleRequested)
    def _on_request(self, request: ScaleRequested, _record: Record) -> None:
        self.asked += request.wanted["n"]

    @on(StopRequested)
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
        topic = topic_of(record.subject)
        assert topic is not None
        number = int(record.headers.get("number", "0"))
        output.append((topic.name, number, record.headers.get(NONCE, "")))
    return output


async def killed(one: Counting) -> None:
    """Leave as a killed process does: without another word."""
    one.context.stop.set()
    await one.keeper.close()
    one.context.tasks.cancel()
