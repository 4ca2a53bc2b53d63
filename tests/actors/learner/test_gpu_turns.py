"""Turns on a shared GPU: learner and engine never have it at once, whoever dies, on a real server."""

import asyncio

import pytest

from actors.engine.shared_gpu import SharedGpu
from actors.learner.fold import LearnerFold
from actors.learner.gpu_handoff import Turns
from actors.learner.group import Stopping
from actors.learner.outbox import Outbox
from actors.runtime.keeper import Keeper
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from harness.stage import until
from topics.gpu_handoff import CARD_REQUESTED, CARD_RETURNED, CardLeft, CardTaken
from topics.topic import TRAINING
from topics.wire import decode

SHARED = {"placement": {"colocate": "time_slice"}, "engine": {"start_deadline_s": 0.2, "update_deadline_s": 0.2}}


class Learner:
    """The part of a learner that takes turns."""

    def __init__(self, stage, bus, patience_s=None):
        self.context = stage.context("learner", bus)
        fold = LearnerFold(self.context.config)
        self.keeper = Keeper(self.context, TRAINING, fold)
        self.turns = Turns(self.context, self.keeper, fold)
        if patience_s is not None:
            self.turns._patience_s = patience_s
        self.outbox = Outbox(self.keeper)
        self.fold = fold

    async def give_back(self):
        await self.turns.give_back(self.outbox)

    async def close(self):
        self.context.stop.set()
        await self.keeper.close()


class Engine:
    """The part of an engine that takes turns."""

    def __init__(self, stage, bus, number=1):
        self.context = stage.context("engine", bus)
        self.context.actor_id = f"engine-{number}"
        self.news = asyncio.Event()
        self.card = SharedGpu(self.context, self.news)

    async def wanted(self):
        await until(lambda: self.card.wanted, "the engine is asked")


@pytest.fixture
async def actors(stage, connect, bus):
    opened, stage = [], stage(**SHARED)

    async def open_learner(patience_s=60.0):
        opened.append(Learner(stage, await connect(bus.run, name="learner"), patience_s))
        await opened[-1].keeper.start()
        return opened[-1]

    async def open_engine(number=1):
        engine = Engine(stage, await connect(bus.run, name="engine"), number)
        await engine.card.start()
        return engine

    yield open_learner, open_engine
    for learner in opened:
        await learner.close()


async def newest(bus, topic):
    record = await read_last(bus, topic)
    return None if record is None else decode(topic.message, record.data)


async def test_the_learner_has_the_card_once_every_engine_has_left_and_engines_once_it_is_returned(actors):
    open_learner, open_engine = actors
    learner, engines = await open_learner(), [await open_engine(1), await open_engine(2)]
    for engine in engines:
        assert await engine.card.take()
    taking = asyncio.create_task(learner.turns.take())
    await engines[0].wanted()
    await engines[0].card.leave()
    await until(lambda: learner.fold.state.turns.holders == ["engine-2"], "one has left")
    assert not taking.done()
    vitals = learner.context.take_vitals()
    assert (vitals.doing.kind, [work.waiting.name for work in vitals.held]) == ("awaiting card", ["engine-2"])
    again = asyncio.create_task(engines[0].card.take())
    await engines[1].card.leave()
    await taking
    assert learner.context.take_vitals().doing.kind == ""
    assert not again.done()

    await learner.give_back()
    assert await again
    assert await newest(learner.context.bus, CARD_RETURNED) == await newest_turn(learner)


async def newest_turn(learner):
    found = await newest(learner.context.bus, CARD_RETURNED)
    assert found is not None and found.turn == (await newest(learner.context.bus, CARD_REQUESTED)).turn
    return found


async def test_a_taking_that_comes_behind_the_request_is_void_and_one_before_it_counts(actors):
    open_learner, open_engine = actors
    learner, engine, late = await open_learner(), await open_engine(1), await open_engine(2)
    await publish(engine.context.bus, CardTaken("engine-1"))  # stored; its process has not looked yet
    taking = asyncio.create_task(learner.turns.take())
    await engine.wanted()
    await until(lambda: learner.fold.state.turns.holders == ["engine-1"], "the taking is counted")
    assert not taking.done()
    late.card._asked = 0  # the request has not reached it: it takes the GPU, and looks
    behind = asyncio.create_task(late.card.take())
    await publish(engine.context.bus, CardLeft("engine-1"))
    await taking
    assert not behind.done()
    assert learner.fold.state.turns.holders == []

    await learner.give_back()
    assert await behind


async def test_a_learner_that_starts_needs_nobody_to_return_the_turn_of_the_one_before(actors):
    open_learner, open_engine = actors
    first, engine = await open_learner(), await open_engine()
    await first.turns.take()
    first.context.stop.set()  # as if it had died with the GPU
    await first.keeper.close()
    waiting = asyncio.create_task(engine.card.take())
    second = await open_learner()
    await second.turns.take()
    assert second.fold.state.turns.turn == 2
    assert not waiting.done()
    await second.give_back()
    assert await waiting


async def test_the_successor_of_an_engine_that_died_with_the_card_leaves_it(actors):
    open_learner, open_engine = actors
    learner, engine = await open_learner(), await open_engine()
    assert await engine.card.take()
    taking = asyncio.create_task(learner.turns.take())
    await engine.wanted()
    assert not taking.done()
    successor = await open_engine()  # the process before ended with its server
    waiting = asyncio.create_task(successor.card.take())
    await taking
    await learner.give_back()
    assert await waiting


async def test_an_engine_that_does_not_leave_is_left_out_and_ends(actors):
    open_learner, open_engine = actors
    learner, engine = await open_learner(patience_s=0.3), await open_engine()
    assert await engine.card.take()
    await learner.turns.take()

    assert learner.context.vitals["cards_not_left"] == 1
    await until(engine.context.stop.is_set, "the engine ends")
    assert "continues without this engine" in str(engine.context.faults[0])
    assert (await newest(learner.context.bus, CARD_REQUESTED)).without == ["engine-1"]


async def test_whoever_shall_stop_waits_for_the_card_no_longer(actors):
    open_learner, open_engine = actors
    learner, engine = await open_learner(), await open_engine()
    assert await engine.card.take()
    taking = asyncio.create_task(learner.turns.take())
    await engine.wanted()
    await engine.card.close()
    await taking
    other = await open_engine(2)
    waiting = asyncio.create_task(other.card.take())
    other.context.stop.set()
    assert not await waiting

    await learner.give_back()
    third = await open_engine(3)
    assert await third.card.take()
    taking = asyncio.create_task(learner.turns.take())
    await third.wanted()
    learner.context.stop.set()
    learner.keeper.wake()
    with pytest.raises(Stopping):
        await taking
