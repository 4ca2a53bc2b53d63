"""The requests that benchmarks keep under way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.engine.client import EngineClient
from asyncrl.engine.fleet import Fleet
from benchmarks.load import BEGAN, PROBES, LoadSettings, _Requests
from harness.sglang_like import Asked, like_sglang
from harness.stage import until
from topics.engines import EngineReady


@pytest.mark.parametrize("number", [0, PROBES], ids=["probe", "common"])
async def test_the_first_token_of_a_request_is_seen_when_it_comes_however_few_follow(number: int):
    faults = list[BaseException]()
    async with like_sglang() as server:

        async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
            yield server.answer(asked, asked.tokens(1), None)
            await server.until_aborted(asked)  # no other token comes

        server.events, server.serve, server.weight_version = events, server.until_aborted, "0:3:made"
        fleet = Fleet(lambda _, address: EngineClient(address), counts={}, fail=faults.append)
        fleet.apply(EngineReady("engine-1", server.address, 0, 3, "made", 32))
        settings = LoadSettings("", "", "", running=1, in_place=False, vocabulary=64, answer=8)
        requests = _Requests(settings, fleet)
        asking = asyncio.create_task(requests.ask(number))
        await until(lambda: requests.events.versions == [BEGAN, 3], "its first token")

        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await fleet.close()
    assert requests.events.requests == [number, number] and not faults
