"""Keepers: decisions take effect when read back, one writer keeps a log, and no update is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from conftest import Connect, Stage, until

from actors.actor import ActorDown, Context
from actors.keeper import NONCE, Decision, Input, Keeper
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import WrongSequence
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.provision import stream_states
from asyncrl.bus.server import EmbeddedServer
from asyncrl.bus.talk import EXPECT_LAST, say
from topics.actors import (
    FLEET_SCALED,
    KEEPER_TOPICS,
    SCALE_REQUESTED,
    STOP_REQUESTED,
    FleetScaled,
    ScaleRequested,
    StopRequested,
)
from topics.table import topic_of
from topics.topic import ACTORS, FLEET, Topic

CLAIMED = next(topic for topic in KEEPER_TOPICS if topic.name == "warden.claimed")


class Counted(FleetScaled):
    """A number on the keeper's log."""

    def headers(self) -> dict[str, str]:
        return {"number": str(self.wanted["n"])}


class Counter:
    """A fold that counts: each `fleet.scaled` says the number it is, each `control.scaled` asks for one more."""

    def __init__(self) -> None:
        self.value = 0
        self.asked = 0
        self.reasons: list[str] = []

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        if topic is FLEET_SCALED:
            self.value = message.wanted["n"]
        elif topic is SCALE_REQUESTED:
            self.asked += message.wanted["n"]
        elif topic is STOP_REQUESTED:
            self.reasons.append(message.reason)

    def next(self) -> Decision:
        return Decision(FLEET_SCALED, Counted({"n": self.value + 1}), id=f"{self.value + 1}")


class Counting:
    """A keeper that counts, with its fold."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.fold = Counter()
        self.keeper = Keeper(context, FLEET, [Input(ACTORS, [SCALE_REQUESTED, STOP_REQUESTED])], self.fold)

    async def count_to(self, value: int) -> None:
        while self.fold.value < value and not self.context.stop.is_set():
            await self.keeper.append([self.fold.next()])


Open = Callable[..., Any]


@pytest.fixture
async def opened(connect: Connect, bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Open]:
    """Opens counting keepers on the same log, each with a connection of its own."""
    counting: list[Counting] = []
    stand = stage(keepers={"lease_s": 1.0})

    async def open_one(actor_id: str = "warden-1") -> Counting:
        context = stand.context("warden", await connect(bus.run, name=actor_id))
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
    await asyncio.wait_for(reader.caught_up.wait(), 10)
    await reader.close()
    said = []
    for record in records:
        topic = topic_of(record.subject)
        assert topic is not None
        number = int(record.headers.get("number", "0"))
        said.append((topic.name, number, record.headers.get(NONCE, "")))
    return said


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
    several = [Decision(FLEET_SCALED, FleetScaled({"n": value}), id=f"{value}") for value in range(1, 101)]

    assert await one.keeper.append(several)

    assert one.fold.value == 100


async def test_a_keeper_that_starts_again_knows_everything(opened: Open, bus: Bus):
    first = await opened()
    await first.keeper.start()
    await first.count_to(7)
    await first.keeper.close()

    await say(bus, SCALE_REQUESTED, ScaleRequested({"n": 3}))
    second = await opened()
    await second.keeper.start()

    assert (second.fold.value, second.fold.asked) == (7, 3)
    assert await second.keeper.append([second.fold.next()])
    assert second.fold.value == 8


async def test_inputs_are_folded_as_they_come_even_when_they_are_large(opened: Open, bus: Bus):
    one = await opened()
    await one.keeper.start()

    await say(bus, STOP_REQUESTED, StopRequested("x" * 2_000_000))
    await say(bus, STOP_REQUESTED, StopRequested("small, and behind the large one"))

    await until(lambda: len(one.fold.reasons) == 2, "both are folded")
    assert [len(reason) for reason in one.fold.reasons] == [2_000_000, 31]


async def test_the_newer_claim_wins_and_the_older_keeper_leaves_without_another_word(opened: Open, bus: Bus):
    older, newer = await opened(), await opened()
    await older.keeper.start()
    counting = asyncio.create_task(older.count_to(10_000))
    await until(lambda: older.fold.value > 10, "the older keeper is at work")

    await newer.keeper.start()
    await asyncio.wait_for(counting, 10)

    assert older.context.stop.is_set()
    assert "another warden took over this log" in str(older.context.faults[0])
    value = newer.fold.value
    assert not await older.keeper.append([older.fold.next()])
    assert await newer.keeper.append([newer.fold.next()])
    assert newer.fold.value == value + 1
    said = [(topic, writer) for topic, _, writer in await log_of(bus)]
    claim = said.index((CLAIMED.name, newer.keeper.nonce))
    assert older.keeper.nonce not in [writer for _, writer in said[claim:]]
    assert not newer.context.faults


async def test_of_keepers_that_start_at_the_same_moment_one_is_left(opened: Open):
    several = [await opened() for _ in range(4)]

    results = await asyncio.gather(*(one.keeper.start() for one in several), return_exceptions=True)

    assert [result for result in results if result is not None] == []
    await until(lambda: sum(not one.context.stop.is_set() for one in several) == 1, "one keeper is left")
    [left] = [one for one in several if not one.context.stop.is_set()]
    assert await left.keeper.append([left.fold.next()])


async def increment(bus: Bus, times: int) -> None:
    """A stranger that counts on the same log by reading its end and appending with compare-and-set."""
    value, last = 0, 0

    def see(record: Record) -> None:
        nonlocal value, last
        last = record.sequence
        if topic_of(record.subject) is FLEET_SCALED:
            value = int(record.headers["number"])

    reader = LogReader(bus, FLEET, see)
    await reader.start()
    while times:
        message, key = Counted({"n": value + 1}), f"stranger:{value}:{last}"
        try:
            sequence = await say(
                bus, FLEET_SCALED, message, id=key, headers={EXPECT_LAST: str(last), NONCE: "stranger"}
            )
        except WrongSequence:
            sequence = last + 1
        else:
            times -= 1
        await until(lambda sequence=sequence: last >= sequence, "the stranger reads on")
        await asyncio.sleep(0)
    await reader.close()


async def test_a_spare_takes_over_when_its_writer_is_silent_and_not_before(opened: Open, monkeypatch):
    monkeypatch.setattr("actors.keeper.BEAT_S", 0.2)
    writer, spare = await opened(), await opened("warden-2")
    await writer.keeper.start()
    await writer.count_to(3)
    standing_by = asyncio.create_task(spare.keeper.start())
    await until(lambda: spare.fold.value == 3, "the spare folds along")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):  # two leases, with beats in them
            await asyncio.shield(standing_by)

    await killed(writer)
    await asyncio.wait_for(standing_by, 10)
    await spare.count_to(5)

    assert spare.fold.value == 5
    assert not spare.context.faults


async def killed(one: Counting) -> None:
    """Leave as a killed process does: without another word."""
    one.context.stop.set()
    await one.keeper.close()
    for task in list(one.context._tasks):
        task.cancel()


async def claims(bus: Bus) -> int:
    return [topic for topic, *_ in await log_of(bus)].count(CLAIMED.name)


async def test_a_keeper_that_starts_again_stands_by_while_another_writes(opened: Open, bus: Bus, monkeypatch):
    monkeypatch.setattr("actors.keeper.BEAT_S", 0.2)
    first, spare = await opened(), await opened("warden-2")
    await first.keeper.start()
    taking_over = asyncio.create_task(spare.keeper.start())
    await killed(first)
    await asyncio.wait_for(taking_over, 10)
    await spare.count_to(3)

    again = await opened()
    standing_by = asyncio.create_task(again.keeper.start())
    await until(lambda: again.fold.value == 3, "it folds along")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):  # three leases, with beats in them
            await asyncio.shield(standing_by)

    assert await claims(bus) == 2
    assert not spare.context.faults
    assert await spare.keeper.append([spare.fold.next()])
    await killed(spare)
    await asyncio.wait_for(standing_by, 10)
    assert await again.keeper.append([again.fold.next()])


async def test_a_keeper_whose_own_earlier_life_wrote_last_waits_for_nobody(opened: Open, monkeypatch):
    first, again = await opened(), await opened()
    again.context.cast.keepers.lease_s = 1000.0
    await first.keeper.start()
    await killed(first)

    await asyncio.wait_for(again.keeper.start(), 10)

    assert await again.keeper.append([again.fold.next()])


async def test_of_those_who_stand_by_one_makes_ready_and_claims_when_it_is(opened: Open, bus: Bus):
    several = [await opened(f"warden-{number}") for number in range(1, 5)]
    begun, ready = [], asyncio.Event()

    async def make_ready() -> None:
        begun.append(await claims(bus))
        await ready.wait()

    starting = [asyncio.create_task(one.keeper.start(make_ready)) for one in several]
    await until(lambda: bool(begun), "one makes ready")
    _, waiting = await asyncio.wait(starting, timeout=3)  # three leases

    assert len(waiting) == 4
    assert begun == [0]  # one, and it had not claimed
    assert await claims(bus) == 0
    ready.set()
    done, _ = await asyncio.wait(starting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert [task.exception() for task in done] == [None]
    assert await claims(bus) == 1
    for one in several:
        await killed(one)
    await asyncio.gather(*starting)


async def test_a_writer_that_comes_back_while_another_makes_ready_stays(opened: Open, bus: Bus):
    frozen, spare = await opened(), await opened("warden-2")
    await frozen.keeper.start()
    for task in list(frozen.context._tasks):
        task.cancel()  # no heartbeat

    async def wake_up() -> None:
        await frozen.count_to(1)

    with pytest.raises(ActorDown, match="another warden writes this log"):
        await spare.keeper.start(wake_up)

    assert await claims(bus) == 1
    await frozen.count_to(2)
    assert not frozen.context.faults


async def test_no_update_is_lost_between_two_writers(opened: Open, bus: Bus, connect: Connect):
    one = await opened()
    await one.keeper.start()
    won = 0
    stranger = asyncio.create_task(increment(await connect(bus.run), 40))
    while not stranger.done() or won < 40:
        won += await one.keeper.append([one.fold.next()])
    await stranger

    numbers = [number for topic, number, _ in await log_of(bus) if topic == FLEET_SCALED.name]
    assert numbers == list(range(1, 40 + won + 1))


async def test_a_foreign_record_between_decisions_refuses_all_that_follow(opened: Open, bus: Bus, connect: Connect):
    one, other = await opened(), await connect(bus.run)
    await one.keeper.start()
    said = 0
    several = [Decision(FLEET_SCALED, Counted({"n": value}), id=f"{value}") for value in range(1, 201)]

    for number in range(20):
        appending = asyncio.create_task(one.keeper.append(several))
        await say(other, FLEET_SCALED, Counted({"n": 0}), id=f"stranger:{number}", headers={NONCE: "stranger"})
        said += not await appending

    runs: list[list[int]] = [[]]
    for topic, number, writer in await log_of(bus):
        if writer == one.keeper.nonce and topic == FLEET_SCALED.name:
            runs[-1].append(number)
            if number == len(several):
                runs.append([])
        elif runs[-1]:
            runs.append([])
    assert said
    assert all(run == list(range(1, len(run) + 1)) for run in runs)


async def test_facts_are_appended_whatever_others_say_on_the_log(opened: Open, bus: Bus, connect: Connect):
    one = await opened()
    await one.keeper.start()
    stranger = asyncio.create_task(increment(await connect(bus.run), 40))

    for value in range(100, 120):
        await one.keeper.insist([Decision(FLEET_SCALED, Counted({"n": value}), id=f"{value}:{part}") for part in "abc"])
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
    await asyncio.wait_for(counting, 20)

    assert one.fold.value == 300
    assert not one.context.faults


async def test_a_keeper_claims_a_log_whose_newest_records_have_expired(opened: Open, bus: Bus):
    first = await opened()
    await first.keeper.start()
    await first.count_to(2)
    await first.keeper.close()
    stream = FLEET.full_name(bus.run)
    last = int((await stream_states(bus))["FLEET"]["last_seq"])
    await bus.api(f"STREAM.MSG.DELETE.{stream}", {"seq": last})

    second = await opened()
    await asyncio.wait_for(second.keeper.start(), 10)

    assert second.fold.value == 1
    assert await second.keeper.append([second.fold.next()])


async def test_unreadable_records_are_buried_and_the_keeper_goes_on(opened: Open, bus: Bus):
    one = await opened()
    await one.keeper.start()

    await bus.store(SCALE_REQUESTED.subject(bus.run), b"garbage", {"by": "hand"})
    await bus.store(FLEET_SCALED.subject(bus.run), b"\xc1", {})
    await say(
        bus, FLEET_SCALED, FleetScaled({"other": 1}), headers={NONCE: "stranger"}
    )  # readable, but not what the fold needs
    await say(bus, SCALE_REQUESTED, ScaleRequested({"n": 2}))

    await until(lambda: one.fold.asked == 2, "what came after them is folded")
    await until(lambda: has_letters(bus, 3), "three dead letters")
    await one.count_to(3)
    assert one.fold.value == 3
    assert one.context.vitals["dead_letters"] == 3


async def has_letters(bus: Bus, count: int) -> bool:
    return await letters(bus) == count


async def test_a_bug_in_a_fold_ends_the_keeper_aloud(opened: Open, bus: Bus):
    one = await opened()
    one.context.bus.on_fault = one.context.fail
    one.fold.apply = lambda topic, message, record: message.nothing_of_that_name
    await one.keeper.start()

    await say(bus, SCALE_REQUESTED, ScaleRequested({"n": 2}))

    await asyncio.wait_for(one.context.stop.wait(), 10)
    assert "nothing_of_that_name" in str(one.context.faults[0])
