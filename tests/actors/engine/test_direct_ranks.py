"""Versions of a model that lies over the ranks of a learner: each rank's tensors come from a sender of its own."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.engine.actor import EngineActor
from actors.learner.group import RankProcesses
from actors.learner.publication import publish_version, step
from actors.learner.weight_handles import Offers
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from asyncrl.training.publisher import Publisher
from asyncrl.weights.sender_calls import Answer, Command, Send
from harness.direct import playing, reached, ready_of, sampled, senders_are_there, server_of, ways
from harness.learning import pack
from harness.stage import DEADLINE_S, Stage
from harness.versions import Answers
from topics.weights import WeightsPublished


class Ranks:
    """Two pipeline stages, in processes of their own, and versions that they publish."""

    def __init__(self, context: Context) -> None:
        self.group = RankProcesses(context, lambda: None)
        self.offers = Offers(context, lambda: self.group.ask(Publisher.shared))
        self._bus = context.bus
        self._version = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, context: Context) -> AsyncIterator["Ranks"]:
        ranks = cls(context)
        try:
            await ranks.group.open()
            await ranks.offers.start()
            yield ranks
        finally:
            await ranks.offers.close()
            await ranks.group.close()

    async def publish(self) -> WeightsPublished:
        """Make a step, and announce its version as the learner does."""
        self._version += 1
        await step(self.group, await pack(self._bus, self._version))
        await self.offers.withdraw()
        await self.group.ask(Publisher.copy_weights, False)
        message = await publish_version(self.group, 0, self._version)
        self.offers.open(message.key)
        await publish(self._bus, message, headers={WRITER: "learner"})
        return message


@pytest.fixture
async def context(bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr("actors.engine.weight_transfer._ANSWER_S", 2 * DEADLINE_S)  # a loaded machine is slow
    made = stage(
        engine={"kind": "embedded", "count": 2, "max_running": 4},
        learner={"trainer": "megatron", "ranks": 2, "layout": {"pipeline": 2}, "start_s": 300.0, "lr": 1e-3},
        weights={"transport": "gloo", "transport_deadline_s": 2 * DEADLINE_S},
        supervision={"silence_s": 5.0},
    )
    made.make_model()
    await made.open()
    return made.context("engine", bus)


def dies_when_it_sends(actor: EngineActor, rank: int) -> None:
    """Kill the sender of a rank as soon as its turn has come."""
    assert actor._direct is not None
    sender = (actor._direct._senders() or [])[rank]
    call = sender.call

    async def killed(command: Command) -> Answer:
        if isinstance(command, Send):
            sender._process.process.send_signal(signal.SIGKILL)
        return await call(command)

    sender.call = killed  # type: ignore[method-assign]


async def test_each_stage_sends_what_it_holds_and_what_dies_in_a_transfer_costs_its_own_engine_alone(
    bus: Bus, context: Context
):
    async with Ranks.opened(context) as ranks, Answers(bus) as answers, playing(context) as first:
        both = tuple(f"engine-{number}" for number in (1, 2))
        async with playing(context, 2) as second:
            await asyncio.gather(senders_are_there(first), senders_are_there(second))
            await ranks.publish()
            await asyncio.gather(*(reached(answers, 1, name) for name in both))
            sent = [{one.name for call in sender.calls for one in call} for sender in first._direct._senders()]

            dies_when_it_sends(second, rank=1)
            await ranks.publish()
            await asyncio.gather(*(reached(answers, 2, name) for name in both))
            alike = [await sampled(context, answers, name) for name in both]

            await senders_are_there(second)
            await ranks.publish()
            await asyncio.gather(*(reached(answers, 3, name) for name in both))
            stopped = server_of(second)
            stopped.suspend()
            await ranks.publish()
            await reached(answers, 4)
            stopped.kill()
            async with asyncio.timeout(DEADLINE_S):
                message = await ranks.publish()
            await reached(answers, 5)
        async with playing(context, 2):  # it is started again
            await reached(answers, 5, "engine-2")
            again = [await sampled(context, answers, name) for name in both]

    stages = [{name.split(".")[2] for name in names if ".layers." in name} for names in sent]
    assert stages == [{"0"}, {"1"}]
    assert "model.embed_tokens.weight" in sent[0] - sent[1] and "model.norm.weight" in sent[1] - sent[0]
    assert ways(answers) == dict.fromkeys(range(1, 6), "gloo")
    assert [ready.direct for ready in ready_of(answers, "engine-2")[:3]] == ["gloo", "", "gloo"]
    # Whoever is first to know: this host of its process, or the server of its connection.
    assert re.search("the sender ended|Connection (reset|closed)", ready_of(answers, "engine-2")[1].fallback)
    assert alike[0] == alike[1]
    assert again[0] == again[1]
    assert again[0][0] == message.key
