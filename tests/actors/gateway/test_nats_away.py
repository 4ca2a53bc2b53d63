"""Serving goes on while the NATS server is away: facts wait in memory, up to a bound, and are stored once, in order."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.server import EmbeddedServer
from asyncrl.live.stored import TurnReader
from harness.gateways import gateway, in_two_halves, stored_turns
from harness.sdks import anthropic, openai, sdks
from harness.sglang_like import LikeSGLang
from harness.stage import LEASE_S, Stage, until
from topics.keys import TurnCounted
from topics.turns import FeedbackGiven, ReplyKept, TurnFinished, TurnStarted

MOST = 12  # tokens of a reply
USER = [{"role": "user", "content": "abc"}]


async def replies(first: Any, second: Any) -> list[str]:
    """Stream one reply of each API; those of OpenAI end by their limit."""
    chat = [
        chunk.choices[0].delta.content or ""
        async for chunk in await first.chat.completions.create(model="any", messages=USER, max_tokens=MOST, stream=True)
    ]
    response = await first.responses.create(model="any", input="abc", max_output_tokens=MOST)
    async with second.messages.stream(model="any", messages=USER, max_tokens=MOST) as stream:
        message = await stream.get_final_message()
    return ["".join(chat), response.output_text, message.content[0].text]


async def test_a_server_killed_in_the_middle_of_streams_is_noticed_by_no_client(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    go_on = in_two_halves(inference)
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        async with sdks(served.address, served.key) as (first, second):
            talking = [asyncio.create_task(replies(first, second)) for _ in range(3)]
            await until(lambda: len(inference.asked) == 3, "three streams have begun")
            server.kill()
            await server.ended()
            await until(lambda: not bus.client.is_connected, "the gateway has noticed")
            go_on.set()
            texts = await asyncio.gather(*talking)  # raises what any request raised
        assert len({tuple(text) for text in texts}) == 1 and len(set(texts[0])) == 1 and texts[0][0]
        assert served.count("facts_waiting") == 3 + 2 * 3 * 2 + 3  # and the responses
        await server.start()
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
        facts = [fact for fact in await stored_turns(bus) if not isinstance(fact, ReplyKept)]
    begun = [fact.turn_id for fact in facts if isinstance(fact, TurnStarted)]
    ended = {fact.turn_id: fact for fact in facts if not isinstance(fact, TurnStarted)}
    assert len(begun) == len(set(begun)) == len(ended) == 9 and set(begun) == ended.keys()
    assert all(len(end.tokens) == len(end.versions) == MOST for end in ended.values())
    places = {(type(fact), fact.turn_id): place for place, fact in enumerate(facts)}
    assert all(places[TurnStarted, name] < places[type(ended[name]), name] for name in begun)
    assert served.count("turns_unrecorded") == 0


async def test_beyond_the_bound_replies_are_given_and_unrecorded_turns_counted(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        served.gateway._facts._most = 1500  # bytes: less than one MB, which the setting counts in
        async with sdks(served.address, served.key) as (first, second):
            await server.stop()
            await until(lambda: not bus.client.is_connected, "the gateway has noticed")
            for _ in range(3):
                assert await replies(first, second)
        lost = served.count("turns_unrecorded")
        await server.start()
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
        facts = await stored_turns(bus)
    begun = {fact.turn_id for fact in facts if isinstance(fact, TurnStarted)}
    ends = [fact for fact in facts if isinstance(fact, TurnFinished)]
    assert begun == {end.turn_id for end in ends} and len(ends) == len(begun) > 0
    whole = [end for end in ends if end.finish == "length"]
    assert lost == 9 - len(whole) > 0
    counted = [fact.turn_id for fact in facts if isinstance(fact, TurnCounted)]  # also where the gateway dies
    assert len(counted) == len({*counted}) == lost and not {*counted} & {end.turn_id for end in whole}
    assert all(len(end.tokens) == 0 for end in ends if end.finish == "gone")


async def test_a_conversation_is_stored_whole_where_a_turn_of_it_was_lost(
    bus: Bus,
    server: EmbeddedServer,
    stage: Callable[..., Stage],
    inference: LikeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("actors.gateway.turn_store._ANYWAY_BYTES", 1000)
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        served.gateway._facts._most = 0
        async with sdks(served.address, served.key) as (first, _):
            await server.stop()
            await until(lambda: not bus.client.is_connected, "the gateway has noticed")
            ask: dict[str, Any] = {"model": "any", "input": "abc", "max_output_tokens": MOST}
            reply = await first.responses.create(**ask)
            assert served.count("turns_unrecorded") == 1
            for _ in range(10):
                await first.delete("/sessions/s1", cast_to=object)
            assert 0 < served.count("facts_waiting") < 5 and served.count("facts_lost") > 5
            await server.start()
            await until(lambda: served.count("facts_waiting") == 0, "what waited is stored")
            for _ in range(2):
                reply = await first.responses.create(**ask, previous_response_id=reply.id)
        begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
        assert [turn.parent for turn in begun] == ["", begun[0].turn_id]
        for turn, asked in zip(begun, inference.asked[1:], strict=True):
            assert (await TurnReader(bus).read(turn.turn_id)).prompt.tolist() == asked.ids


async def test_where_the_stream_of_turns_is_full_replies_are_given_and_those_that_wait_are_stored_when_it_has_room(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    sizes = equal_sizes(payload_mb=64, ledger_mb=16)
    await provision(bus, sizes | {"TURNS": 1000}, lease_s=LEASE_S)
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, second),
    ):
        for _ in range(3):
            assert await replies(first, second)
        assert served.count("facts_waiting") > 0
        reply = await second.messages.create(model="any", messages=USER, max_tokens=MOST)
        with pytest.raises(openai.InternalServerError, match="may not be stored yet; try again"):
            await first.post("/feedback", cast_to=object, body={"turn": "msg_0", "thumb": "up"})
        await first.post("/feedback", cast_to=object, body={"turn": reply.id, "thumb": "up"})
        await provision(bus, sizes, lease_s=LEASE_S)
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
    facts = await stored_turns(bus)
    assert len(facts) == 21 + 3 and isinstance(facts[-1], FeedbackGiven) and f"msg_{facts[-1].turn_id}" == reply.id


async def test_where_engines_cannot_be_reached_either_each_api_has_its_overload(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference, queue_timeout_s=0.3, keepalive_s=0.1) as served:
        await server.stop()
        await inference.die()
        async with sdks(served.address, served.key) as (first, second):
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="no engine took the request") as chat:
                    await first.chat.completions.create(model="any", messages=USER, stream=stream)
                with pytest.raises(openai.InternalServerError, match="no engine took the request") as response:
                    await first.responses.create(model="any", input="abc", stream=stream)
                with pytest.raises(anthropic.APIStatusError, match="no engine took the request") as message:
                    await second.messages.create(model="any", messages=USER, max_tokens=MOST, stream=stream)
                found = [error.value.status_code for error in (chat, response, message)]
                assert found == [503, 503, 529]
        await server.start()


async def test_requests_beyond_the_places_are_held_and_then_refused_as_overload(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    go_on = in_two_halves(inference)
    async with (
        gateway(bus, stage, tmp_path / "model", inference, in_flight=1, queue_timeout_s=600.0) as served,
        sdks(served.address, served.key) as (first, second),
    ):
        talking = asyncio.create_task(replies(first, second))
        await until(lambda: len(inference.asked) == 1, "a stream has begun")
        held = asyncio.create_task(first.responses.create(model="any", input="abc", max_output_tokens=2))
        await until(lambda: served.gateway._places.waiting == 1, "a second request waits")
        with pytest.raises(openai.InternalServerError, match="and 1 wait"):
            await first.responses.create(model="any", input="abc")
        go_on.set()
        assert (await held).status == "incomplete"
        assert await talking
