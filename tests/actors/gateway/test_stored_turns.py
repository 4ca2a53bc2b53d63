"""Turns put together from what is stored: under however many data keys, and never from a history that is gone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.live.stored import TurnReader
from asyncrl.live.tenant_keys import owner_of
from asyncrl.run.purge import _erase, _stored, purge
from harness.gateways import Embedded, gateway, stored_turns
from harness.sdks import openai, sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Connect, Stage, until
from topics.turns import TurnFinished, TurnStarted


async def test_a_conversation_goes_on_under_more_data_keys_than_a_message_can_name(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (_, second),
    ):
        messages: list[dict[str, Any]] = []
        for _ in range(70):
            messages.append({"role": "user", "content": "a"})
            reply = await second.messages.create(model="any", messages=messages, max_tokens=1)
            messages.append({"role": "assistant", "content": reply.content[0].text})
            served.gateway._data_keys._current.clear()  # as if a day had passed
        begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert len(begun) == 70 and max(len(turn.older.split(",")) for turn in begun) > 8
    assert sum(not turn.parent for turn in begun) > 1
    reading = await connect(bus.run)
    reader = TurnReader(reading)
    for number in (20, 69):
        assert (await reader.read(begun[number].turn_id)).prompt.tolist() == inference.asked[number].ids

    # What a reader remembers of a conversation is gone with its keys.
    (made,) = (await _stored(bus))[begun[0].secret]
    await _erase(bus, made.sequence)
    reading.vault._known.clear()
    with pytest.raises(SecretGone):
        await reader.read(begun[21].turn_id)


async def test_the_experts_of_a_conversation_are_told_once_and_are_those_of_its_tokens(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], tmp_path: Path
):
    engine = Embedded()
    async with (
        gateway(bus, stage, tmp_path / "model", engine, routed=True, live={"fraction": 0.5}) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        before: str | None = None
        for _ in range(3):
            ask: dict[str, Any] = {"model": "any", "input": "abc", "max_output_tokens": 6}
            before = (await first.responses.create(**ask, previous_response_id=before)).id
        ended = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnFinished)]
        last = ended[-1].turn_id
        read = await TurnReader(await connect(bus.run), routed=True).read(last)
        ids = np.concatenate([read.prompt, read.finished.tokens])
        client = EngineClient(engine.address)
        whole = await client.generate(ids, SamplingParams(1, routed=0))
        await client.close()
    assert np.array_equal(read.experts[:-1], whole.routed.reshape(len(ids), -1)[:-1])
    assert not read.experts[-1].any(), "the last token was not fed"
    rows = [len(fact.routing.rows) // fact.routing.width for fact in ended]
    assert sum(rows) == len(ids) - 1 and min(rows) > 0
    assert [fact.routing.follows for fact in ended] == ["", ended[0].turn_id, ended[1].turn_id]
    assert not (await TurnReader(await connect(bus.run)).read(last)).experts.size


async def test_a_server_that_tells_no_experts_serves_all_the_same(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference, routed=True, live={"fraction": 0.5}) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        reply = await first.responses.create(model="any", input="abc", max_output_tokens=6)
    assert reply.output_text
    (ended,) = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnFinished)]
    assert ended.routing is None


async def test_nothing_goes_on_with_a_purged_turn(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        ask: dict[str, Any] = {"model": "any", "input": "abc", "max_output_tokens": 4}
        keyed, again = {"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}
        one = await first.responses.create(**ask, extra_headers=keyed)
        await purge(bus, owner_of("anna", ""), "", "operator")
        await until(lambda: not served.gateway._data_keys._current, "the gateway has read it")
        with pytest.raises(openai.NotFoundError, match="send all messages"):
            await first.responses.create(**ask, previous_response_id=one.id)
        with pytest.raises(openai.NotFoundError):
            await first.post("/feedback", cast_to=object, body={"turn": one.id, "thumb": "up"})
        others = [await first.responses.create(**ask, extra_headers=headers) for headers in (keyed, again)]
        assert others[0].id == others[1].id != one.id
