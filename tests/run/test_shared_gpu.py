"""A whole run whose learner and engines have one GPU by turns, and die at each point of a turn."""

import os
import signal
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.crash import CRASH_FOLDER, arm
from harness.audited import audited_clean, messages_on, topics_left_by
from harness.runs import Run, address_of, command, two_steps_more, up
from harness.stage import until
from topics.batches import BatchTrained
from topics.engines import ENGINE_READY, EngineReady
from topics.gpu_handoff import CardLeft, CardRequested, CardReturned, CardTaken
from topics.topic import ENGINES, TRAINING

pytestmark = pytest.mark.slow

ROUNDS = [  # points at which a learner and an engine die, in one turn or the next
    ("card.requested", "card.emptied"),
    ("card.granted", "card.left"),
    ("card.rested", "card.taken"),
    ("card.returned", ""),
]


async def test_learner_and_engines_never_have_the_card_at_once_and_whoever_dies_with_it_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    points = tmp_path / "points"
    monkeypatch.setenv(CRASH_FOLDER, str(points))
    async with up(tmp_path, "placement.colocate=time_slice", "engine.count=2", "learner.steps=10000") as run:
        await two_steps_more(run, "steps by turns")
        for learner, engine in ROUNDS:
            files = [arm(points, learner, "learner"), *([arm(points, engine, "engine")] if engine else [])]
            await run.reaches(lambda files=files: not any(file.exists() for file in files), f"{learner} and {engine}")
            await two_steps_more(run, f"steps after the deaths at {learner} and {engine}")
        frozen = run.actor("engine-2")
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        code, output = await command(tmp_path, "scale", "engine=1")
        assert code == 0, output
        await two_steps_more(run, "steps without an engine that was frozen with the GPU, and has no successor")
        await until(lambda: is_often_ready(run), "engines are ready again, more than eight times", 180)
        code, output = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), (output, run.story)
        died = [row for row in run.events("supervisor-1") if row["event"] == "actor died"]
        assert {row["code"] for row in died} == {-9}, "whatever clients send meanwhile, no engine ends over a turn"
    await audited_clean(tmp_path)

    turns = Turns()
    async with topics_left_by(run) as bus:
        await read_merged(bus, [Part(TRAINING), Part(ENGINES)], turns.take, lambda *_: pytest.fail("a dead letter"))
    assert turns.wrong == []
    assert turns.steps > 8 and turns.readies > 8


async def is_often_ready(run: Run) -> bool:
    """Return whether there were many turns; of one, a loaded machine may make several steps."""
    bus = await Bus.connect(address_of(run), "short", name="turns")
    try:
        return len((await messages_on(bus, ENGINES)).on(ENGINE_READY)) > 8
    finally:
        await bus.close()


class Turns:
    """The holders of the GPU, by the order in which one server stored what both sides published."""

    def __init__(self) -> None:
        self.asked, self.returned = 0, 0
        self.holders: set[str] = set()
        self.steps, self.readies = 0, 0
        self.wrong: list[object] = []

    def take(self, _topic, message, _record):
        match message:
            case CardRequested():
                self.asked = message.turn
                assert not message.without
            case CardReturned():
                self.returned = message.turn
            case CardTaken() if self.asked == self.returned:  # else it is void, and left at once
                self.holders.add(message.engine_id)
            case CardLeft():
                self.holders.discard(message.engine_id)
            case BatchTrained():
                self.steps += 1
                if self.holders or self.asked == self.returned:
                    self.wrong.append((message.step, self.holders, self.asked, self.returned))
            case EngineReady():
                self.readies += 1
                if message.engine_id not in self.holders:
                    self.wrong.append(message)
