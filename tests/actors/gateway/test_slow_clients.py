"""A client that stops reading, or sending, is cut off."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from actors.gateway import prompts, request_body
from actors.gateway import reply as reply_of
from actors.gateway.reply import Answered
from asyncrl.bus.connection import Bus
from asyncrl.live.apis.registry import APIS
from asyncrl.live.apis.schema import Ending, LiveError, Opening, Request
from asyncrl.live.sessions import Session
from asyncrl.ports import free_port
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until

MORE_THAN_SOCKETS_HOLD = "x" * 2**25
LIMIT_S = 120


@contextlib.asynccontextmanager
async def client_of(answer: Answered) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve one handler over HTTP; yields a connection to it."""
    app = web.Application()
    app.add_routes([web.post("/", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        await runner.cleanup()


@pytest.mark.parametrize("where", ["the middle", "the end"])
async def test_a_stream_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, where: str):
    monkeypatch.setattr(reply_of, "_READ_S", 0.2)
    ended = asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        request = Request("any", [{"role": "user", "content": "a"}], stream=True)
        turn = SimpleNamespace(id="t1", request=request, opening=Opening("t1", "any", 0, 1))
        reply = reply_of.Reply(http, APIS["responses"], [turn], Session("s_s", "s"))
        try:
            if where == "the middle":
                with pytest.raises(ConnectionResetError, match="reads nothing"):
                    await reply.send(0, MORE_THAN_SOCKETS_HOLD)
                return reply.response or web.Response()
            return await reply.end([Ending(MORE_THAN_SOCKETS_HOLD, 1, "stop")])
        finally:
            ended.set()

    async with client_of(answer) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(len(MORE_THAN_SOCKETS_HOLD)), LIMIT_S)


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_body, "_BODY_S", 0.2)
    refused: asyncio.Future[LiveError] = asyncio.get_running_loop().create_future()

    async def answer(http: web.Request) -> web.StreamResponse:
        try:
            await request_body.read_body(http, 100)
        except LiveError as error:
            refused.set_result(error)
        return web.Response()

    async with client_of(answer) as (_reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
        error = await asyncio.wait_for(refused, LIMIT_S)

    assert error.fault == "invalid" and "not come within 0.2 s" in str(error)


async def test_a_client_that_is_gone_before_its_request_is_whole_is_counted_and_is_no_fault(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prompts, "_LARGE_AT_ONCE", 1)
    async with gateway(bus, stage, tmp_path / "model", inference, queue_timeout_s=600.0) as served:
        head = (
            f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: {served.key}\r\nContent-Length: {2**18 + 1}\r\n\r\n"
        )
        writers, places = [], served.gateway._prompts._large
        for there in (lambda: places._under_way.total() == 1, lambda: places.waiting == 1):
            _, writer = await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
            writers.append(writer)
            writer.write(f"{head}half".encode())
            await until(there, "its head was read")
        for gone in (1, 2):  # the one that waits for room first
            writers.pop().transport.abort()
            await until(lambda gone=gone: served.count("clients_gone") == gone, "it is gone")
        assert served.count("requests_broken") == 0 and not places.waiting and not places._under_way.total()
