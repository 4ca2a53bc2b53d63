"""Long prompts: they are refused before they are encoded where that can be known, and hold up no others."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from actors.gateway import prompts
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.keys import make_key
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until

LIMIT_S = 120
LARGE, LONG = 300_000, 20_000


def body_of(text: str) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 3}


class Encoding:
    """Has each long text wait in its thread until it is let go; how many tokens white space has is not known before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.go_on = threading.Event()
        encode = TaskTokenizer.encode

        def waits(tokenizer: TaskTokenizer, text: str) -> Any:
            if len(text) >= LONG:
                self.begun.append(len(text))
            if len(text) >= LARGE:
                assert self.go_on.wait(LIMIT_S)
            return encode(tokenizer, text)

        monkeypatch.setattr(TaskTokenizer, "encode", waits)


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    made = Encoding(monkeypatch)
    yield made
    made.go_on.set()


async def test_a_prompt_that_is_certainly_too_long_is_not_encoded(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, encoding: Encoding
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        ClientSession(served.address, headers={"x-api-key": served.key}) as http,
        asyncio.timeout(LIMIT_S),
    ):
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"):
            body = body_of("ab " * 1_000_000)
            if path.endswith("tokens"):
                del body["max_tokens"]
            refused = await http.post(path, json=body)
            error = (await refused.json())["error"]
            assert refused.status == 400 and "prompt is too long: at least" in error["message"]
            assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        for path, special in (("/v1/completions", True), ("/v1/completions", False), ("/tokenize", True)):
            body = {"model": "any", "prompt": "ab " * 1_000_000, "add_special_tokens": special}
            refused = await http.post(path, json=body)
            message = (await refused.json())["error"]["message"]
            assert refused.status == 400 and "prompt is too long: at least" in message
    assert not encoding.begun


async def test_a_long_text_holds_up_no_shorter_one_and_one_whose_client_left_is_not_encoded(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, encoding: Encoding
):
    async with gateway(bus, stage, tmp_path / "model", inference, queue_timeout_s=600.0) as served:
        lines = served.gateway._prompts
        async with ClientSession(served.address, headers={"x-api-key": served.key}) as http, asyncio.timeout(LIMIT_S):
            first = asyncio.create_task(http.post("/v1/messages", json=body_of(" " * LARGE)))
            await until(lambda: encoding.begun == [LARGE], "the first text is encoded")
            left = asyncio.create_task(http.post("/v1/messages", json=body_of(" " * (LARGE + 1))))
            await until(lambda: lines._longest.waiting == 1, "the second one waits")
            assert (await http.post("/v1/messages", json=body_of(" " * LONG))).status == 400  # more than the context
            left.cancel()
            await until(lambda: not lines._longest.waiting, "it is gone")
            encoding.go_on.set()
            assert (await first).status == 400
    assert encoding.begun == [LARGE, LONG]


async def test_slow_bodies_of_one_tenant_leave_room_to_others(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prompts, "_LARGE_AT_ONCE", 2)
    async with gateway(bus, stage, tmp_path / "model", inference, queue_timeout_s=600.0) as served:
        key, added = make_key("ben")
        await publish(bus, added)
        await until(served.gateway._keys.are_of_several, "the gateway knows of both")
        head = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: {served.key}\r\nContent-Length: {LARGE}\r\n\r\n"
        writers, room = [], served.gateway._prompts._large
        for there in (lambda: room._under_way["anna"] == 1, lambda: room.waiting == 1):
            _, writer = await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
            writers.append(writer)
            writer.write(f"{head}half".encode())
            await until(there, "its head was read")
        async with ClientSession(served.address, headers={"x-api-key": key}) as http, asyncio.timeout(LIMIT_S):
            answer = await http.post("/v1/messages", json=body_of("a" * LARGE))
            assert answer.status == 400 and room._under_way["anna"] == 1
        for writer in writers:
            writer.transport.abort()
