"""Addresses behind which there is no engine: what refers to another server, and what never ends its answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest

from asyncrl.engine import batching, client
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.errors import EngineError, EngineUnavailable, RequestFailed
from asyncrl.ports import free_port
from harness.sglang_like import like_sglang
from harness.stage import DEADLINE_S

Handler = Callable[[BaseRequest], Awaitable[web.StreamResponse]]

CALLS = {
    "label": EngineClient.label,
    "load": EngineClient.load,
    "pause": lambda engine: engine.pause("in_place"),
    "update": lambda engine: engine.update_weights("/nowhere", "0:1:d", False),
    "whole": lambda engine: engine.generate([5], SamplingParams(4)),
    "streamed": lambda engine: engine.generate([5], SamplingParams(4), on_tokens=lambda _: None),
}


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[EngineClient]:
    """A client of a server that answers every request like this."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = EngineClient(f"http://127.0.0.1:{port}", api_key="secret")
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("call", CALLS)
async def test_a_request_goes_to_no_server_that_another_one_names(call: str, status: int):
    async with like_sglang() as other:

        async def refer(request: BaseRequest) -> web.StreamResponse:
            await request.read()
            return web.Response(status=status, headers={"Location": f"{other.address}{request.path}"})

        async with answering(refer) as engine:
            with pytest.raises(RequestFailed, match=f"HTTP {status}: it refers to {other.address}/"):
                await CALLS[call](engine)
            assert not await engine.health()

    assert (other.asked, other.paused, other.loads, other.health_asked) == ([], False, [], 0)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("call", CALLS)
async def test_an_answer_without_an_end_is_a_fault_and_fills_no_memory(
    call: str, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "_MOST", 1 << 20)
    monkeypatch.setattr(batching, "_MOST", 2 << 20)
    sent, left = 0, asyncio.Event()

    async def pour(request: BaseRequest) -> web.StreamResponse:
        nonlocal sent
        await request.read()
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/html"})
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 16))
                sent += 1 << 16
        finally:
            left.set()  # its client has closed the connection

    async with answering(pour) as engine, asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineUnavailable, match=r"more than \d{7} bytes came"):
            await CALLS[call](engine)
        await left.wait()
        assert not await engine.health()

    assert sent < 64 << 20


async def test_what_comes_behind_the_end_of_a_stream_is_not_read(monkeypatch: pytest.MonkeyPatch):
    left = asyncio.Event()

    async def pour(request: BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(
            b'data: {"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1, '
            b'"weight_version": "v", "output_token_logprobs": [[-1.0, 7, null]]}}\n\ndata: [DONE]\n\n'
        )
        try:
            while True:
                await response.write(bytes(1 << 16))
        finally:
            left.set()

    async with answering(pour) as engine, asyncio.timeout(DEADLINE_S):
        generation = await engine.generate([5], SamplingParams(4), on_tokens=lambda _: None)
        await left.wait()

    assert generation.token_ids.tolist() == [7]


async def test_a_page_that_is_no_json_is_an_engine_error():
    async def show(request: BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(text="<html>log in</html>", content_type="text/html")

    async with answering(show) as engine:
        for call in ("label", "load", "whole", "streamed"):
            with pytest.raises(EngineError):
                await CALLS[call](engine)
