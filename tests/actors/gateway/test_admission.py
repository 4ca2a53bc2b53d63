"""Limits of a tenant hold over restarts; of a private request nothing is stored but its size."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from asyncrl.live.keys import make_key
from harness.gateways import Served, gateway, gateway_stage, ready, stored_turns
from harness.sdks import anthropic, openai, sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.keys import TurnCounted
from topics.topic import TURNS
from topics.turns import TurnFinished, TurnStarted

USER = [{"role": "user", "content": "abc"}]


async def test_limits_hold_over_a_restart_of_the_gateway(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = time.time()
    monkeypatch.setattr("actors.gateway.meter.time", SimpleNamespace(time=lambda: now))  # within one minute of one day
    made = gateway_stage(stage, tmp_path / "model", inference)
    requests, added = make_key("anna", requests_per_minute=2)
    tokens, also = make_key("ben", tokens_per_day=13)
    for message in (added, also, ready(inference)):
        await publish(bus, message)
    for life in range(2):
        served = Served(bus, made)
        await served.start("someone")
        async with sdks(served.address, requests) as (first, _), sdks(served.address, tokens) as (_, second):
            await first.responses.create(model="any", input="abc", max_output_tokens=4)
            await second.messages.create(model="any", messages=USER, max_tokens=4)  # of 7 tokens in all
            if life:
                with pytest.raises(openai.RateLimitError, match="made 2 requests in the last minute") as refused:
                    await first.responses.create(model="any", input="abc", max_output_tokens=4)
                assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
                with pytest.raises(openai.RateLimitError):  # these are stored, too
                    await first.post("/feedback", cast_to=object, body={"turn": "a", "thumb": "up"})
                with pytest.raises(openai.RateLimitError):
                    await first.delete("/sessions/s", cast_to=object)
                with pytest.raises(openai.RateLimitError):
                    count = {"model": "any", "messages": USER}
                    await first.post("/messages/count_tokens", cast_to=object, body=count)
                with pytest.raises(anthropic.RateLimitError, match="used 14 tokens today") as refused:
                    await second.messages.create(model="any", messages=USER, max_tokens=4)
                assert 0 < int(refused.value.response.headers["retry-after"]) <= 86_400
                assert (await second.messages.count_tokens(model="any", messages=USER)).input_tokens == 3
        await served.stop()


async def test_a_minute_goes_on_over_midnight_and_a_restart(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = time.time()
    monkeypatch.setattr("actors.gateway.meter.time", SimpleNamespace(time=lambda: now))
    made = gateway_stage(stage, tmp_path / "model", inference)
    key, added = make_key("anna", requests_per_minute=1)
    for message in (added, ready(inference)):
        await publish(bus, message)
    for life in range(2):
        served = Served(bus, made)
        await served.start("someone")
        async with sdks(served.address, key) as (client, _):
            if not life:
                await client.responses.create(model="any", input="abc", max_output_tokens=4)
            else:
                with pytest.raises(openai.RateLimitError, match="made 1 requests in the last minute"):
                    await client.responses.create(model="any", input="abc", max_output_tokens=4)
        await served.stop()
        now = time.time() + 10.0
        monkeypatch.setattr("actors.gateway.meter.DAY_S", now - 5.0)  # a day has begun since


async def test_a_prompt_whose_client_goes_before_the_first_token_counts(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    inference.serve = inference.until_aborted
    key, added = make_key("ben", tokens_per_day=3)
    await publish(bus, added)
    async with gateway(bus, stage, tmp_path / "model", inference) as served, sdks(served.address, key) as (_, second):
        await until(lambda: added.key_id in served.gateway._keys.valid, "the key is known")
        cut = asyncio.create_task(second.messages.create(model="any", messages=USER, max_tokens=4))
        await until(lambda: len(inference.asked) == 1, "an engine reads its prompt")
        cut.cancel()
        await until(lambda: served.count("clients_gone") == 1, "it is gone")
        del inference.serve  # it would answer the next one
        with pytest.raises(anthropic.RateLimitError, match="used 3 tokens today"):
            await second.messages.create(model="any", messages=USER, max_tokens=4)


async def test_of_a_private_request_nothing_is_stored_but_its_size(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    private, added = make_key("ben", private=True)
    await publish(bus, added)
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        await until(lambda: served.gateway._keys.valid.keys() >= {added.key_id}, "the key is known")
        opted_out = {"X-Asyncrl-Private": "on", "x-asyncrl-session": "of-me", "x-asyncrl-session-done": "1"}
        async with sdks(served.address, private) as (first, _), sdks(served.address, served.key) as (other, _):
            reply = await first.responses.create(model="any", input="abc", max_output_tokens=4)
            follows = [
                {"role": "user", "content": "abc"},
                {"role": "assistant", "content": reply.output_text},
                {"role": "user", "content": "abc"},
            ]
            await first.responses.create(model="any", input=follows, max_output_tokens=4)
            assert inference.asked[1].ids[:7] == inference.asked[0].ids + inference.asked[0].cumulative
            await other.responses.create(model="any", input="abc", max_output_tokens=4, extra_headers=opted_out)
            await other.responses.create(model="any", input=follows, max_output_tokens=4)  # stored, of its own
        async with ClientSession(headers={"x-api-key": private}) as http:
            assert (await http.delete(f"{served.address}/v1/sessions/of-me")).status == 200
    facts = await stored_turns(bus)
    counts = [fact for fact in facts if isinstance(fact, TurnCounted)]
    (started,) = (fact for fact in facts if isinstance(fact, TurnStarted))
    (finished,) = (fact for fact in facts if isinstance(fact, TurnFinished))
    assert len(facts) == 6  # those, and the response
    assert sorted((fact.tenant, fact.tokens) for fact in counts) == [("anna", 7), ("ben", 7), ("ben", 15)]
    assert (started.tenant, started.parent, started.rewritten) == ("anna", "", 1)
    assert started.turn_id == finished.turn_id
    found: list[Record] = []
    reader = LogReader(bus, TURNS, found.append)
    await reader.start()
    await reader.caught_up.wait()
    await reader.close()
    assert len(found) == 6 and not any(b"ben" in record.data and b"digest" in record.data for record in found)
