"""The router actor with a real `sglang-router` between a fleet and servers that answer as SGLang does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from actors.router.actor import RouterActor
from actors.runtime.actor import ActorDown
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.errors import EngineRefused
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import TRIES, Generator
from asyncrl.engine.request_options import RequestOptions
from harness.sglang_like import Asked, Fault, LikeSGLang, like_sglang
from harness.stage import Stage, until
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.trajectories import Answer
from topics.wire import Int32Array

LONG = 100  # tokens of a streamed generation


def prompt(group: str) -> Int32Array:
    """Return the tokens that all members of a group begin with."""
    return np.array([3, 4, 10 + int(group[1:])], np.int32)


class Served:
    """Two servers of one owner, their engine actors' messages, a router actor, and what samples through it."""

    def __init__(self, bus: Bus, stage: Stage, servers: list[LikeSGLang]) -> None:
        self.bus = bus
        self.stage = stage
        self.servers = servers
        self.counts: dict[str, float] = {}
        context = stage.context("rollout", bus)
        context.vitals = self.counts
        self.fleet = open_fleet(context)
        self.context = context
        self.generator = Generator(self.fleet, ModelInfo("any", 64, 4096), str, counts=self.counts)
        self._close = AsyncExitStack()

    async def start(self) -> None:
        self.router = RouterActor(self.stage.context("router", self.bus))
        self.running = asyncio.create_task(self.router.run())

    async def ready(self, number: int, version: int, name: str = "") -> None:
        server, name = self.servers[number], name or f"engine-{number + 1}"
        server.weight_version = f"0:{version}:d{version}"
        await publish(self.bus, EngineReady(name, server.address, 0, version, f"d{version}", 64))

    async def generate(self, group: str, version: int = 0, tokens: int = 4) -> Answer:
        async with asyncio.timeout(300):
            wanted = Wanted(version, group=group)
            return await self.generator.generate(prompt(group), SamplingParams(tokens), wanted=wanted)

    def asked(self) -> list[list[Asked]]:
        return [server.asked for server in self.servers]


@pytest.fixture
async def served(bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    async with AsyncExitStack() as stack:

        async def made(**engine: Any) -> Served:
            servers = [await stack.enter_async_context(like_sglang()) for _ in range(2)]
            addresses = [server.address for server in servers]
            settings = engine or {"kind": "external", "addresses": addresses, "api_key_file": "key"}
            play = stage(engine={**settings, "router": {"count": 1}})
            (play.files.root / "key").write_text("the owner's")
            made = Served(bus, play, servers)
            for server in servers:
                server.key = "" if engine else "the owner's"
            await made.start()
            stack.push_async_callback(made.fleet.close)
            listener = await follow_fleet(made.context, made.fleet)
            stack.push_async_callback(listener.close)

            async def stop() -> None:
                made.router.context.stop.set()
                await asyncio.gather(made.running, return_exceptions=True)

            stack.push_async_callback(stop)
            return made

        yield made


@asynccontextmanager
async def going(work: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_members_of_a_group_meet_one_engine_and_only_engines_with_the_newest_weights(served: Any):
    play = await served()
    await play.ready(0, 1)
    await play.ready(1, 1)
    await until(lambda: play.router.context.vitals.get("engines") == 2, "both engines are behind the router")
    groups = [f"p{number:06d}" for number in range(8)]

    answers = await asyncio.gather(*(play.generate(group, 1) for group in groups for _ in range(3)))

    assert all(answer.versions.tolist() == [1] * 4 for answer in answers)
    prompts = [prompt(group).tolist() for group in groups]
    places = [{n for n, asked in enumerate(play.asked()) if ids in [one.ids for one in asked]} for ids in prompts]
    assert [len(found) for found in places] == [1] * 8
    assert set().union(*places) == {0, 1}
    assert all(asked.extra_key == "0:1:d1" and asked.together == 1 for asked in play.servers[0].asked)

    await publish(play.bus, EngineUpdating("engine-1", 0, 2))
    await play.ready(0, 2)  # engine-2 is stalled: it holds back nothing
    before = len(play.servers[1].asked)
    answers = await asyncio.gather(*(play.generate(group, 2) for group in groups))

    assert all(answer.versions.tolist() == [2] * 4 for answer in answers)
    assert len(play.servers[1].asked) == before
    assert "mislabelled_tokens" not in play.counts


async def test_a_request_that_its_caller_leaves_is_ended_at_the_engine(served: Any):
    play = await served()
    await play.ready(0, 1)
    ended = asyncio.Event()

    async def endless(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield play.servers[0].answer(asked, [4], None)
                await asyncio.sleep(0.05)  # the router finds out with the next token
        finally:
            ended.set()

    play.servers[0].events = endless
    async with going(play.generate("p000000", 1, 10 * LONG)):
        await until(lambda: bool(play.servers[0].asked), "the engine is asked")

    await asyncio.wait_for(ended.wait(), 120)


async def test_an_engine_that_dies_behind_the_router_costs_no_generation_and_no_token_twice(served: Any):
    play = await served()
    await play.ready(0, 1)
    await until(lambda: play.router.context.vitals.get("engines") == 1, "an engine is behind the router")

    async def dies(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield play.servers[0].answer(asked, [11, 12, 13], None)
        await until(lambda: play.router.context.vitals.get("engines") == 2, "the other has joined")
        await play.servers[0].die()
        raise ConnectionError

    play.servers[0].events = dies
    async with going(play.generate("p000000", 1, LONG)) as running:
        await until(lambda: bool(play.servers[0].asked), "the engine is asked")
        await play.ready(1, 1)
        answer = await running

    assert len(answer.tokens) == LONG
    assert answer.tokens[:3].tolist() == [11, 12, 13]
    assert play.servers[1].asked[0].ids == [*prompt("p000000").tolist(), 11, 12, 13]
    answers = await asyncio.gather(*(play.generate(f"p{number:06d}", 1) for number in range(8)))
    assert [len(answer.tokens) for answer in answers] == [4] * 8  # some wait until it is out


async def test_an_engine_that_does_not_answer_holds_no_other_back_and_ends_no_router(
    served: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.engine.router._JOIN_S", 1000)
    play = await served()
    await play.servers[0].die()
    await play.ready(0, 1)
    async with going(play.generate("p000000", 1)) as running:
        await until(lambda: bool(play.router._router._joining), "the router is told of it")
        await play.ready(1, 1)
        assert len((await asyncio.wait_for(running, 120)).tokens) == 4  # long before the first counts as gone

    assert not play.router.context.faults


async def test_requests_that_an_engine_fails_on_are_not_repeated_by_the_router_and_open_no_circuit_breaker(served: Any):
    play = await served()
    await play.ready(0, 1)

    async def fails(asked: Asked) -> dict[str, Any]:
        if asked.ids == prompt("p000000").tolist():
            raise Fault(500, "a fault of this request")
        return await play.servers[0].whole(asked)

    play.servers[0].serve = fails
    refused = await asyncio.gather(*(play.generate("p000000", 1) for _ in range(4)), return_exceptions=True)
    assert [type(error) for error in refused] == [EngineRefused] * 4

    rids = [asked.rid for asked in play.servers[0].asked]
    assert (len(rids), len(set(rids))) == (4 * TRIES, 4 * TRIES)  # more than the ten that open a circuit breaker
    assert len((await asyncio.wait_for(play.generate("p000001", 1), 120)).tokens) == 4


async def test_a_router_answers_no_request_without_its_key(served: Any):
    play = await served()
    await play.ready(0, 1)
    await play.generate("p000000", 1)
    key = play.stage.files.key_of("router-1")
    body = {"input_ids": [3], "sampling_params": {}, "url": "http://127.0.0.1:1"}

    async with aiohttp.ClientSession(play.router._router.address) as session:
        for path in ("/generate", "/workers"):
            async with session.post(path, json=body) as response:
                assert response.status == 401
        async with session.get("/workers", headers={"Authorization": f"Bearer {key.read_text()}"}) as response:
            assert len((await response.json())["workers"]) == 1
    assert key.stat().st_mode & 0o077 == 0


async def test_a_router_that_is_started_again_costs_no_generation_and_no_token_that_came(served: Any):
    play = await served()
    await play.ready(0, 1)
    server, answer = play.servers[0], Answer("generate", "", done=False)

    async def begins(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield server.answer(asked, [11, 12], None)
        await asyncio.Event().wait()

    server.events = begins
    sampling, wanted = SamplingParams(LONG), Wanted(1, group="p000000")
    work = play.generator.generate(prompt("p000000"), sampling, wanted=wanted, answer=answer)
    async with going(work) as running:
        await until(lambda: len(answer.tokens) == 2, "tokens came")
        server.events = server.one_event
        play.router._router.kill()
        await asyncio.wait_for(play.running, 300)
        [fault] = play.router.context.faults
        assert isinstance(fault, ActorDown)  # its supervisor starts it again
        assert str(fault).startswith("the router ended: exit code -9")
        await play.start()
        assert len((await asyncio.wait_for(running, 300)).tokens) == LONG

    assert answer.tokens[:2].tolist() == [11, 12]
    assert [asked.ids[3:] for asked in server.asked] == [[], [11, 12]]


APART = {
    "first": {"kind": "sglang", "arguments": ["--disaggregation-mode", "prefill"]},
    "second": {"kind": "sglang", "arguments": ["--disaggregation-mode=decode"], "max_running": 7},
}


async def apart(served: Any) -> Served:
    """A prefill and a decode server with version 1 behind a router that takes requests."""
    play: Served = await served(groups=APART)
    for number, name in enumerate(("engine-first-1", "engine-second-1")):
        assert "engines" not in play.router.context.vitals
        await play.ready(number, 1, name)
    assert len((await play.generate("p000000", 1)).tokens) == 4
    return play


async def test_disaggregated_servers_answer_once_both_roles_are_there(served: Any):
    play = await apart(served)

    assert [len(asked) for asked in play.asked()] == [1, 1]
    first, second = (asked[0].bootstrap for asked in play.asked())
    assert first == second
    assert first["bootstrap_port"] == 8998
    await publish(play.bus, EngineGone("engine-first-1", "stopped"))
    await publish(play.bus, EngineUpdating("engine-second-1", 0, 2))
    await until(lambda: play.router._published is None, "requests are held")


async def test_a_prefill_server_with_newer_weights_computes_no_prompt_for_a_decode_server(served: Any):
    play = await apart(served)
    await publish(play.bus, EngineUpdating("engine-first-1", 0, 2))
    await until(lambda: play.router._published is None, "requests are held")
    await play.ready(0, 2, "engine-first-1")
    headers = {"Authorization": f"Bearer {play.stage.files.key_of('router-1').read_text()}"}
    late = {"input_ids": [3], "sampling_params": {"max_new_tokens": 4}, "rid": "late", "stream": False}

    async with aiohttp.ClientSession(play.router._router.address, headers=headers) as session:

        async def refused() -> bool:
            async with session.post("/generate", json=late) as response:
                return response.status == 503

        await until(refused, "neither server is behind the router")
        before = len(play.servers[0].asked)
        assert await refused()
    assert len(play.servers[0].asked) == before

    await play.ready(1, 2, "engine-second-1")
    assert (await play.generate("p000000", 2)).versions.tolist() == [2] * 4


async def test_tokens_whose_prompt_a_prefill_server_may_have_computed_by_newer_weights_are_discarded(served: Any):
    play, asked_at, go_on = await apart(served), asyncio.Event(), asyncio.Event()

    async def late(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        play.servers[1].events = play.servers[1].one_event
        asked_at.set()
        await go_on.wait()
        yield play.servers[1].answer(asked, [29, 29, 29], "abort", weight_version="0:1:d1")

    play.servers[1].events = late
    async with going(play.generate("p000001", 1, LONG)) as running:
        await asked_at.wait()
        await publish(play.bus, EngineUpdating("engine-first-1", 0, 2))
        await until(lambda: all(engine.ready is None for engine in play.fleet._engines.values()), "workers know")
        await play.ready(0, 2, "engine-first-1")
        go_on.set()
        await until(lambda: play.counts.get("mislabelled_tokens") == 3, "the tokens are counted")
        await play.ready(1, 2, "engine-second-1")
        answer = await running

    assert answer.versions.tolist() == [2] * LONG
    assert 29 not in answer.tokens[:3]


async def test_tokens_are_kept_where_a_router_is_announced_again_with_the_same_weights(served: Any):
    play, asked_at, go_on = await apart(served), asyncio.Event(), asyncio.Event()

    async def late(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        asked_at.set()
        await go_on.wait()
        yield play.servers[1].answer(asked, asked.tokens())

    play.servers[1].events = late
    async with going(play.generate("p000001", 1, LONG)) as running:
        await asked_at.wait()
        again = msgspec.structs.replace(play.router._published, slots=99)  # a decode server has joined
        await publish(play.bus, again)
        await until(lambda: [engine.slots for engine in play.fleet._engines.values()] == [99], "workers know")
        go_on.set()
        answer = await running

    assert answer.versions.tolist() == [1] * LONG
    assert not play.counts


async def test_requests_stay_at_their_engine_while_it_and_the_others_take_new_weights(served: Any):
    play, updated = await served(), asyncio.Event()
    model, manner = ModelInfo("any", 64, 4096), RequestOptions(in_place=True)
    play.generator = Generator(play.fleet, model, str, counts=play.counts, manner=manner)

    def stays(server: LikeSGLang) -> Callable[[Asked], AsyncIterator[dict[str, Any]]]:
        async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
            if asked.limit == LONG:
                yield server.answer(asked, asked.tokens(LONG - 8), None)
                await updated.wait()
                yield server.answer(asked, asked.tokens(4), None)
            yield server.answer(asked, asked.tokens(4))

        return events

    for number, server in enumerate(play.servers):
        server.events = stays(server)
        await play.ready(number, 1)
    await until(lambda: play.router.context.vitals.get("engines") == 2, "both engines are behind the router")
    running = [asyncio.create_task(play.generate(f"p{number:06d}", 1, LONG)) for number in range(8)]
    await until(lambda: sum(map(len, play.asked())) == 8, "all of them run")
    counts = [len(asked) for asked in play.asked()]
    for number in (0, 1):  # the second is taken out of the router, and put back
        await publish(play.bus, EngineUpdating(f"engine-{number + 1}", 0, 2))
        await play.ready(number, 2)
        await until(lambda number=number: play.router.context.vitals.get("engines") == 1 + number, "it has joined")
        assert (await play.generate("p000009", 2)).versions.tolist() == [2] * 4
    updated.set()
    answers = await asyncio.gather(*running)

    assert min(counts) > 0
    assert sum(map(len, play.asked())) == 8 + 2  # one request for each
    assert all(answer.versions.tolist() == [1] * (LONG - 4) + [2] * 4 and answer.hybrid for answer in answers)
    assert not play.counts
