"""`POST /v1/feedback` over real HTTP: stored once, for turns of one's own tenant, refused in the shape of the API."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from actors.gateway.turn_store import TurnStore
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone
from asyncrl.bus.publish import Prepared, publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.live.keys import make_key
from asyncrl.live.spool import Spool, Waiting
from harness.audited import messages_on
from harness.gateways import Served, gateway
from harness.sdks import sdks
from harness.sglang_like import like_sglang
from harness.stage import Stage, until
from topics.topic import TURNS
from topics.turns import FEEDBACK_GIVEN, FeedbackGiven

USER = [{"role": "user", "content": "abc"}]


async def replies(served: Served) -> list[str]:
    """Return the ids of a reply of each API."""
    async with sdks(served.address, served.key) as (first, second):
        chat = await first.chat.completions.create(model="any", messages=USER, max_tokens=3)
        response = await first.responses.create(model="any", input="abc", max_output_tokens=3)
        message = await second.messages.create(model="any", messages=USER, max_tokens=3)
        return [chat.id, response.id, message.id]


async def give(
    served: Served, turn: str, key: str = "", version: str = "", private: str = "", **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Return status and body of the answer."""
    named = {"anthropic-version": version, "x-asyncrl-private": private}
    headers = {"x-api-key": key or served.key} | {name: value for name, value in named.items() if value}
    async with (
        ClientSession(headers=headers) as http,
        http.post(f"{served.address}/v1/feedback", json={"turn": turn, **fields}) as response,
    ):
        return response.status, await response.json()


async def stored(bus: Bus) -> list[FeedbackGiven]:
    return (await messages_on(bus, TURNS)).on(FEEDBACK_GIVEN)


async def test_feedback_is_stored_once_for_a_reply_of_any_api(bus: Bus, stage: Callable[..., Stage], tmp_path: Path):
    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference) as served:
        chat, response, message = await replies(served)
        twice = (give(served, chat, thumb="down", text="too long") for _ in range(4))  # in the same moment
        first, *others = await asyncio.gather(*twice)
        again = await give(served, chat, thumb="down", text="too long")
        assert [*others, again] == [first] * 4
        assert first[0] == 200 and first[1]["turn"] == chat.removeprefix("chatcmpl-") and first[1]["score"] == -1.0
        assert (await give(served, response, number=0.25))[0] == 200
        assert (await give(served, message, thumb="up"))[0] == 200
        found = await stored(bus)
        assert [(one.tenant, one.score, one.text) for one in found] == [
            ("anna", -1.0, "too long"),
            ("anna", 0.25, ""),
            ("anna", 1.0, ""),
        ]
        for thumb in ("up", "down"):  # the user changes the mind, and back
            assert (await give(served, message, thumb=thumb))[0] == 200
        assert (await give(served, message, thumb="up"))[0] == 200
        scores = [one.score for one in await stored(bus) if f"msg_{one.turn_id}" == message]
        assert scores == [1.0, -1.0, 1.0]


async def test_what_may_not_be_judged_is_refused_in_the_shape_of_the_api(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference) as served:
        chat, _, message = await replies(served)
        key, added = make_key("ben")
        await publish(bus, added)

        async def is_known() -> bool:
            return (await give(served, chat, key))[0] != 401

        await until(is_known, "the gateway has the other tenant's key")

        status, body = await give(served, chat, key, thumb="up")
        assert (status, body["error"]["type"], body["error"]["param"]) == (403, "invalid_request_error", "turn")
        assert "another tenant" in body["error"]["message"]
        status, body = await give(served, message, key, "2023-06-01", thumb="up")
        assert (status, body["error"]["type"]) == (403, "permission_error")
        status, body = await give(served, "chatcmpl-0", thumb="up")
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert (await give(served, "msg_0", version="2023-06-01", thumb="up"))[1]["error"]["type"] == "not_found_error"
        status, body = await give(served, chat, thumb="sideways")
        assert (status, body["error"]["param"]) == (400, "thumb")
        assert (await give(served, chat, "sk-wrong", thumb="up"))[0] == 401
        assert await stored(bus) == []


async def test_what_another_gateway_has_yet_to_store_may_be_known_soon(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    asked = {"model": "any", "input": "abc", "max_output_tokens": 3, "previous_response_id": "resp_0"}
    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference, count=2) as served:
        other = Spool(served.context.files.spool / "gateway-2")
        other.open()
        statuses = []
        async with ClientSession(headers={"x-api-key": served.key}) as http:
            for change in (lambda: None, lambda: other.add(Waiting(1, Prepared("t", "k", b"", {}))), other.drop_first):
                change()
                statuses.append((await give(served, "resp_0", thumb="up"))[0])
                async with http.post(f"{served.address}/v1/responses", json=asked) as response:
                    statuses.append(response.status)
        other.close()
    assert statuses == [404, 404, 503, 503, 404, 404]


async def test_feedback_that_is_not_to_be_stored_is_refused(bus: Bus, stage: Callable[..., Stage], tmp_path: Path):
    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference) as served:
        chat, _, _ = await replies(served)
        key, added = make_key("anna", private=True)
        await publish(bus, added)
        await until(lambda: added.key_id in served.gateway._keys.valid, "the key is known")
        for how in ({"private": "1"}, {"key": key}):
            status, body = await give(served, chat, text="too long", thumb="down", **how)
            assert status == 403 and "feedback is stored" in body["error"]["message"]
        assert await stored(bus) == []
        assert (await give(served, chat, text="too long", thumb="down", private="0"))[0] == 200


async def test_feedback_waits_while_the_nats_server_is_away_and_is_stored_once_behind_its_turn(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference) as served:
        key, added = make_key("ben")
        await publish(bus, added)
        await until(lambda: added.key_id in served.gateway._keys.valid, "the key is known")
        before, _, _ = await replies(served)
        await server.stop()
        await until(lambda: not bus.client.is_connected, "the gateway has noticed")
        _, _, during = await replies(served)
        first = await give(served, before, thumb="up", text="thanks")
        assert first[0] == 200 and await give(served, before, thumb="up", text="thanks") == first
        assert (await give(served, before, thumb="down"))[0] == (await give(served, during, number=0.5))[0] == 200
        assert (await give(served, during, key, thumb="down"))[0] == 403
        status, body = await give(served, "chatcmpl-0", thumb="up")  # whether it is there only the server knows
        assert (status, body["error"]["type"]) == (503, "server_error")
        raw = (served.gateway._context.files.spool / "gateway-1").read_bytes()
        assert b"thanks" not in raw and b"feedback.given" in raw
        drain, first_of = asyncio.Event(), TurnStore._store_first

        async def held(facts: TurnStore) -> None:
            await drain.wait()
            await first_of(facts)

        monkeypatch.setattr(TurnStore, "_store_first", held)
        await server.start()
        await until(lambda: bus.client.is_connected, "the server is back")
        assert (await give(served, before, thumb="up"))[0] == 200  # behind what still waits
        drain.set()
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
        assert (await give(served, during, number=0.5))[0] == 200
        with monkeypatch.context() as hurried:
            hurried.setattr("actors.gateway.feedback._LIMIT_S", 0.1)
            hurried.setattr("actors.gateway.turn_store._PATIENCE_S", 0.1)
            server.process.send_signal(signal.SIGSTOP)
            assert (await give(served, during, thumb="up"))[0] == 200
            server.process.send_signal(signal.SIGCONT)
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
    found = await stored(bus)
    assert [(one.turn_id, one.score, one.text) for one in found] == [
        (before.removeprefix("chatcmpl-"), 1.0, "thanks"),
        (before.removeprefix("chatcmpl-"), -1.0, ""),
        (during.removeprefix("msg_"), 0.5, ""),
        (before.removeprefix("chatcmpl-"), 1.0, ""),
        (during.removeprefix("msg_"), 1.0, ""),
    ]


async def test_feedback_that_is_stored_without_an_answer_waits_under_the_same_id_and_is_stored_once(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def unanswered(bus: Bus, given: FeedbackGiven) -> int:
        await publish(bus, given)
        raise BusGone("the acknowledgement is lost")

    async with like_sglang() as inference, gateway(bus, stage, tmp_path / "model", inference) as served:
        chat, _, _ = await replies(served)
        assert (await give(served, chat, thumb="up"))[0] == 200
        with monkeypatch.context() as lost:
            lost.setattr("actors.gateway.feedback.publish", unanswered)
            status, answer = await give(served, chat, thumb="down")
        assert status == 200
        await until(lambda: served.count("facts_waiting") == 0, "all facts are stored")
        assert await give(served, chat, thumb="down") == (200, answer)
        found = await stored(bus)
    assert [(one.feedback_id, one.score) for one in found][1:] == [(answer["id"].removeprefix("feedback_"), -1.0)]
