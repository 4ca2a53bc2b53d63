"""What clients should not send: over real HTTP, each gets one answer in the shape of its API."""

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.live.difference import TurnBoundary
from harness.gateways import Served, gateway, gateway_stage, ready, stored_turns
from harness.live_runs import TEMPLATE
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.turns import TurnStarted

USER = {"role": "user", "content": "abc"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://h/i.png"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "any", "messages": [USER], "max_tokens": 3},
    "responses": {"model": "any", "input": [USER], "max_output_tokens": 3},
    "messages": {"model": "any", "messages": [USER], "max_tokens": 3},
}
REQUEST, MISSING, LARGE = "invalid_request_error", "not_found_error", "request_too_large"


def with_content(path: str, content: Any) -> dict[str, Any]:
    field = "input" if path == "responses" else "messages"
    return BODIES[path] | {field: [USER | {"content": content}]}


async def test_a_long_text_is_encoded_beside_the_loop_on_which_streams_wait(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    encoded: list[bool] = []
    whole = TurnBoundary.whole

    def noted(*given: Any) -> Any:
        encoded.append(threading.current_thread() is threading.main_thread())
        return whole(*given)

    monkeypatch.setattr(TurnBoundary, "whole", noted)
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        login = {"Authorization": f"Bearer {served.key}"}
        async with ClientSession(served.address, headers=login) as http:
            for text, status in (("a" * 1_000_000, 400), ("a", 200)):
                counted = {"model": "any", "messages": [USER | {"content": text}]}
                whole_body = counted | {"max_tokens": 3, "top_p": 0}
                assert (await http.post("/v1/messages", json=whole_body)).status == status
                assert (await http.post("/v1/messages/count_tokens", json=counted)).status == status
    assert encoded == [False, False, True, True]
    assert 0 < inference.asked[0].sampling["top_p"] < 1e-3  # engines refuse 0


@pytest.mark.parametrize("path", BODIES)
async def test_each_has_one_answer_in_the_shape_of_its_api(
    bus: Bus,
    stage: Callable[..., Stage],
    inference: LikeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
):
    body = BODIES[path]
    cases: list[tuple[Any, int, str, str]] = [
        (b'{"model": "any", ', 400, REQUEST, "the body is not JSON"),
        (b'{"model": "\xff"}', 400, REQUEST, "the body is not JSON"),
        (b"x" * 40_000, 413, LARGE, "the body is larger than"),
        (body | {"model": "gpt"}, 404, MISSING, "model 'gpt' is not served here; there are any"),
        (with_content(path, "a" * 600), 400, REQUEST, "prompt is too long: 600 tokens; the model takes 1 to 511"),
        (with_content(path, [IMAGE]), 400, REQUEST, "this gateway takes text"),
        (with_content(path, {"a": 1}), 400, REQUEST, "expected a text, or a list of parts of text"),
    ]
    if path == "responses":
        forged = body | {"previous_response_id": "resp_" + "0" * 24}
        cases.append((forged, 404, MISSING, "no response '000000000000000000000000' of yours is known here"))
        # Nothing is left out of a conversation, also where a client allows it.
        cases.append((with_content(path, "a" * 600) | {"truncation": "auto"}, 400, REQUEST, "prompt is too long: 600"))
        cases.append((body | {"truncation": "some"}, 400, REQUEST, 'truncation is "some", which this gateway does not'))
    async with gateway(bus, stage, tmp_path / "model", inference, body_kb=32, models=["any"]) as served:
        url, login = f"{served.address}/v1/{path}", {"Authorization": f"Bearer {served.key}"}
        async with ClientSession() as http:
            for given, status, kind, words in cases:
                content = {"data": given} if isinstance(given, bytes) else {"json": given}
                answer = await http.post(url, headers=login, **content)
                found = await answer.json()
                error = found["error"]
                assert (answer.status, words in error["message"]) == (status, True), found
                if path == "messages":
                    assert found["type"] == "error" and error["type"] == kind
                    assert found["request_id"] == answer.headers["request-id"]
                else:
                    assert error["type"] == REQUEST and error.keys() == {"message", "type", "param", "code"}
                    assert (error["code"] == "context_length_exceeded") == ("too long" in words)
            nothing = await http.get(
                f"{served.address}/v1/nothing", headers={"anthropic-version": "1"} if path == "messages" else {}
            )
            assert (nothing.status, "no GET /v1/nothing" in (await nothing.json())["error"]["message"]) == (404, True)
            models = [await http.get(f"{served.address}/v1/models/{name}", headers=login) for name in ("any", "gpt")]
            assert [one.status for one in models] == [200, 404] and (await models[0].json())["id"] == "any"
            answer = await http.post(url, headers={"Authorization": "Bearer sk-none"}, json=body)
            assert answer.status == 401
            with monkeypatch.context() as patched:  # a fault of the gateway itself
                patched.setattr("actors.gateway.prompts.check_model", None)
                answer = await http.post(url, headers=login, json=body)
                error = (await answer.json())["error"]
                assert (answer.status, "the gateway failed" in error["message"]) == (500, True)
                assert error["type"] == ("api_error" if path == "messages" else "server_error")
            # A history that never was is written anew, and counted.
            field = "input" if path == "responses" else "messages"
            never = body | {field: [USER, {"role": "assistant", "content": "xyz"}, USER]}
            assert (await http.post(url, headers=login, json=never)).status == 200
            assert served.count("replies_rewritten") == 1
    (begun,) = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert (begun.parent, begun.rewritten) == ("", 1)


async def test_messages_that_the_template_refuses_are_a_400_with_its_words(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    made = gateway_stage(stage, tmp_path / "model", inference)
    refuses = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    template = TEMPLATE.replace("{{ m.content }}", refuses + "{{ m.content }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    served = Served(bus, made)
    await served.start()
    await publish(bus, ready(inference))
    try:
        async with ClientSession(served.address, headers={"x-api-key": served.key}) as http:
            for path, body in BODIES.items():
                field = "input" if path == "responses" else "messages"
                system = {"role": "system", "content": "ab"}
                for given, status in (([system, USER], 200), ([system, system, USER], 400), ([USER, system], 400)):
                    answer = await http.post(f"/v1/{path}", json=body | {field: given})
                    assert answer.status == status
                    assert status == 200 or "system comes first" in (await answer.json())["error"]["message"]
    finally:
        await served.stop()


async def test_few_large_bodies_are_in_memory_at_once_and_small_ones_pass(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.gateway.prompts._LARGE_AT_ONCE", 1)
    rest = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": "any", '
        await rest.wait()
        yield b'"max_tokens": 3, "messages": [{"role": "user", "content": "abc"}]}'

    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        ClientSession(served.address, headers={"x-api-key": served.key}) as http,
    ):
        served.gateway._prompts._large._hold_s = 0.01
        slow = asyncio.create_task(http.post("/v1/messages", data=slowly()))  # of a size that nobody knows
        await until(lambda: served.gateway._prompts._large._under_way.total() == 1, "it has come")
        large = json.dumps(with_content("messages", "a" * 2**19)).encode()
        packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        assert (await http.post("/v1/messages", data=large)).status == 529
        assert (await http.post("/v1/messages", data=gzip.compress(large), headers=packed)).status == 529
        assert (await http.post("/v1/messages", json=BODIES["messages"])).status == 200
        rest.set()
        assert (await slow).status == 200


async def test_a_packed_body_is_unpacked_as_far_as_it_may_be_large_and_nowhere_else(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unpacked = list[int]()

    class Counted:
        def __init__(self, *given: Any, **named: Any) -> None:
            self._own = decompressobj(*given, **named)

        def decompress(self, *given: Any) -> bytes:
            found: bytes = self._own.decompress(*given)
            unpacked.append(len(found))
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

    bomb = gzip.compress(bytes(2**26))
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        ClientSession(served.address) as http,
    ):
        key = {"Authorization": f"Bearer {served.key}"}
        for path, body in BODIES.items():
            url, raw = f"/v1/{path}", json.dumps(body).encode()
            for encoding, sent in (("gzip", gzip.compress(raw)), ("deflate", zlib.compress(raw)), ("identity", raw)):
                answer = await http.post(url, data=sent, headers=key | {"Content-Encoding": encoding})
                assert answer.status == 200
            for encoding, sent, said in (
                ("gzip", b"torn", "not encoded as its headers say"),
                ("gzip", gzip.compress(raw)[:-1], "not encoded as its headers say"),
                ("br", raw, "not known here"),
            ):
                answer = await http.post(url, data=sent, headers=key | {"Content-Encoding": encoding})
                error = (await answer.json())["error"]
                assert (answer.status, error["type"]) == (400, "invalid_request_error") and said in error["message"]
            decompressobj = zlib.decompressobj
            with monkeypatch.context() as counted:
                counted.setattr(zlib, "decompressobj", Counted)
                for login, status in ((key, 413), ({}, 401)):
                    answer = await http.post(url, data=bomb, headers=login | {"Content-Encoding": "gzip"})
                    assert answer.status == status
                    assert (await http.get("/health")).status == 200  # behind it, on the same connection or another
        assert 0 < sum(unpacked) <= len(BODIES) * (served.gateway._settings.body_kb * 1024 + 1)
