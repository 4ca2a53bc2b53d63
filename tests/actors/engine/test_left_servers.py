"""A server of another owner: it is left as it was found, while it takes a version or where it cannot be used."""

import asyncio
from collections.abc import Callable

import pytest

from actors.engine.actor import EngineActor
from actors.runtime.actor import ActorDown
from asyncrl.bus.connection import Bus
from harness.sglang_like import like_sglang
from harness.stage import DEADLINE_S, Stage, until
from harness.versions import Answers, Versions
from topics.engines import EngineGone


async def test_an_actor_that_is_asked_to_leave_does_not_wait_for_the_load_and_leaves_the_server_sampling(
    bus: Bus, stage: Callable[..., Stage]
):
    """A supervisor kills an actor that takes too long to leave, and a server that it held would be held for ever."""
    loading = asyncio.Event()

    async def never(_key: str) -> str:
        loading.set()
        await asyncio.Event().wait()
        return ""

    async with like_sglang() as server, Answers(bus) as answers:
        server.refusal = never
        engines = stage(engine={"kind": "external", "addresses": [server.address]})
        context = engines.context("engine", bus)
        learner = Versions(bus, context)
        await learner.announce(await learner.publish())
        actor = asyncio.create_task(EngineActor(context).run())
        async with asyncio.timeout(DEADLINE_S):
            await loading.wait()
            assert server.paused
            context.stop.set()
            await actor

        assert not server.paused
        await until(lambda: any(isinstance(one, EngineGone) for one in answers.messages), "it says that it has left")
    assert answers.ready() == []


async def test_a_server_of_which_several_processes_label_tokens_gets_no_weights(bus: Bus, stage: Callable[..., Stage]):
    async with like_sglang() as server:
        server.info = {"tokenizer_worker_num": 2}
        context = stage(engine={"kind": "external", "addresses": [server.address]}).context("engine", bus)
        learner = Versions(bus, context)
        await learner.announce(await learner.publish())

        with pytest.raises(
            ActorDown, match=r"it has --tokenizer-worker-num 2: .*start it without that, or start several servers"
        ):
            await asyncio.wait_for(EngineActor(context).run(), DEADLINE_S)
        assert not server.loads
        assert not server.paused
