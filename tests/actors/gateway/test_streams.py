"""Streams over real HTTP: the order of their events, and what ends none of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from harness.gateways import gateway, in_two_halves, stored_turns
from harness.live_runs import answers
from harness.sdks import openai, sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.keys import KeyRevoked
from topics.turns import TurnStarted

USER = [{"role": "user", "content": "abc"}]


async def test_events_are_numbered_as_they_come_and_a_key_that_is_revoked_ends_no_request_under_way(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    go_on = in_two_halves(inference)
    async with (
        gateway(bus, stage, tmp_path / "model", inference, stream_tokens=1) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        stream = await first.responses.create(model="any", input=USER, max_output_tokens=4, stream=True)
        began = [await anext(stream) for _ in range(5)]
        (known,) = served.gateway._keys.valid
        await publish(bus, KeyRevoked(key_id=known))

        async def refused() -> bool:
            return not await answers(served.address, "/v1/models", served.key)

        await until(refused, "the key is revoked")
        with pytest.raises(openai.AuthenticationError):
            await first.responses.create(model="any", input=USER)
        go_on.set()
        events = began + [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events[:4]] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete" and events[-1].response.usage.output_tokens == 4


async def test_a_stream_that_tells_its_usage_has_it_in_every_chunk_and_in_the_last_one_alone_it_is_known(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    ask = {"model": "any", "messages": USER, "max_tokens": 2, "stream": True}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        told = [
            chunk async for chunk in await first.chat.completions.create(**ask, stream_options={"include_usage": True})
        ]
        untold = [chunk async for chunk in await first.chat.completions.create(**ask)]
    assert all("usage" in chunk.model_fields_set for chunk in told)
    assert [chunk.usage is not None for chunk in told] == [False] * (len(told) - 1) + [True] and not told[-1].choices
    assert not any("usage" in chunk.model_fields_set for chunk in untold)


async def test_penalties_go_to_the_engine_and_such_a_turn_is_not_trained(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -1.0}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        await first.chat.completions.create(model="any", messages=USER, max_tokens=2, **penalties)
    assert penalties.items() <= inference.asked[0].sampling.items()
    assert [fact.skip for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)] == ["penalised"]
