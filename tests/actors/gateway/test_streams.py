"""Streams over real HTTP: the order of their events, and what ends none of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.gateway.turn import Turn
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.config.live_settings import GatewaySettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.live.apis.schema import Piece, Request
from asyncrl.live.conversation import Prompt
from asyncrl.live.tools import Wording
from asyncrl.live.turn_log import asked as asked_for
from harness.gateways import gateway, in_two_halves, stored_turns
from harness.live_runs import answers, conversing_model
from harness.sdks import openai, sdks
from harness.sglang_like import Asked, LikeSGLang
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


async def test_a_client_is_kept_while_tokens_come_that_make_no_text_yet(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    met = asyncio.Event()

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        *tokens, last = asked.tokens()
        for token in tokens:
            if not met.is_set():
                yield inference.answer(asked, [token], None)
                await asyncio.sleep(0.01)
        yield inference.answer(asked, [last])

    inference.events = events
    form = {"type": "json_object"}  # its text waits for the end
    async with (
        gateway(bus, stage, tmp_path / "model", inference, stream_tokens=1, keepalive_s=0.3) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        alive, text = 0, ""
        async for chunk in await first.chat.completions.create(
            model="any", messages=USER, max_tokens=100, stream=True, response_format=form
        ):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            if not text and not choice.delta.model_fields_set and choice.finish_reason is None:
                alive += 1
                met.set()
    assert alive and text


async def test_what_comes_while_a_slow_client_reads_is_sent_behind_the_end_of_the_generation(tmp_path: Path):
    tokenizer = TaskTokenizer.load(conversing_model(tmp_path / "model"))
    tokens, request = tokenizer.encode("abcdef"), Request("any", USER, stream=True)
    (who,) = asked_for("anna", "chat", request, {}, messages=b"")
    turn = Turn(request, Prompt(tokens), Wording.of(tokenizer), GatewaySettings(), asked=who)
    tape, whole, sent = TokenBuffer(turn._answer), asyncio.get_running_loop().create_future(), list[Piece | None]()

    def come(part: slice) -> None:
        tape.extend(tokens[part], np.zeros(len(tokens[part]), np.float32), 0)
        turn.on_tokens(len(tokens[part]), 0, 0)

    async def send(piece: Piece | None) -> None:
        sent.append(piece)
        if not whole.done():
            come(slice(1, None))
            whole.set_result(None)

    come(slice(1))
    await asyncio.wait_for(turn._stream(asyncio.ensure_future(whole), None, send), 60)  # type: ignore[arg-type]
    assert "".join(map(str, sent)) == "abcdef"
