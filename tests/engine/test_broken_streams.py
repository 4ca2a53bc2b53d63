"""Streams that break off while their engine takes new weights, or because it is gone."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.fleet import Fleet, Wanted
from asyncrl.engine.generator import Generator
from harness.counting import IDS, Counting
from harness.scripted_servers import Servers, never
from harness.sglang_like import Asked, like_sglang
from harness.stage import DEADLINE_S
from topics.engines import EngineGone, EngineReady


async def test_a_stream_that_breaks_off_behind_an_update_takes_no_requests_from_its_engine():
    """SGLang does that to a request with tokens to send when it is aborted."""
    fleet, counts, watch = Fleet(lambda _, address: EngineClient(address), counts={}, fail=never), {}, Counting(3)
    generator = Generator(fleet, ModelInfo("any", 64, 1024), str, counts=counts)
    async with like_sglang() as server:

        def take(version: int) -> None:
            server.weight_version = f"0:{version}:made"
            fleet.apply(EngineReady("engine-1", server.address, 0, version, "made", 32))

        async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
            server.events = server.one_event  # of the next request
            yield server.answer(asked, asked.tokens(3), None)
            await watch.reached.wait()
            take(1)
            raise ConnectionError

        take(0)
        server.events = events
        server.healthy = False  # an engine taken for dead would not be asked again
        async with asyncio.timeout(DEADLINE_S):
            answer = await generator.generate(IDS, SamplingParams(100), watch=watch)
        await fleet.close()

    assert answer.versions.tolist() == [0] * 3 + [1] * 97
    assert counts == {"broken_by_update": 1, "resumed": 1}


async def test_an_engine_that_is_gone_is_not_asked_for_its_health():
    """Its client is closed then, and would fail."""
    servers, asked = Servers(), 0
    one = servers.start("one")

    async def health() -> bool:
        nonlocal asked
        asked += 1
        return True

    async def checked() -> None:
        servers.fleet.check(engine)
        for _ in range(5):  # turns of the loop; the first check shows that they are enough
            await asyncio.sleep(0)

    one.health = health
    engine = servers.fleet.take(Wanted())
    await checked()
    assert asked == 1

    servers.fleet.apply(EngineGone("one", "stopped"))
    await checked()
    assert asked == 1
