"""Connections of a gateway, on the event loop that it has: which are closed, and what is said to one too many."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvloop
from aiohttp import web

from actors.gateway import listening as listening_of
from actors.gateway.listening import listening
from actors.gateway.reply import Answered
from asyncrl.ports import free_port

LIMIT_S = 120


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


ASKED = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def port_of(answer: Answered, *, most: int, silent_s: float) -> AsyncIterator[int]:
    """Serve one handler as a gateway does."""
    app = web.Application()
    app.add_routes([web.post("/", answer)])
    async with listening(app, "127.0.0.1", port := free_port(), most=most, silent_s=silent_s):
        yield port


async def test_headers_that_do_not_come_end_their_connection_and_a_reply_under_way_does_not():
    go_on = asyncio.Event()

    async def answer(_http: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.Response(text="whole")

    async with port_of(answer, most=9, silent_s=0.3) as port, asyncio.timeout(LIMIT_S):
        patient, waits = await asyncio.open_connection("127.0.0.1", port)
        waits.write(ASKED)
        for begun in (b"", ASKED[:-2]):  # nothing at all; headers without their end
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            assert await reader.read() == b""
            writer.close()
        go_on.set()
        assert b"200 OK" in await patient.readuntil(b"whole")
        waits.write(ASKED[:-2])  # of a second request
        assert await patient.read() == b""
        waits.close()


async def test_a_connection_too_many_is_told_so_and_a_place_that_becomes_free_is_taken():
    async def answer(_http: web.Request) -> web.StreamResponse:
        return web.Response(text="whole")

    async def first_line() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED)
        return await reader.readline(), writer

    async with port_of(answer, most=2, silent_s=60) as port, asyncio.timeout(LIMIT_S):
        for _ in range(2):
            line, held = await first_line()
            assert line == b"HTTP/1.1 200 OK\r\n"
        reader, _refused = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        error = json.loads(body)
        assert "too many connections" in error["error"]["message"]
        ids = {f"{name}: {error['request_id']}" for name in ("request-id", "x-request-id")}
        assert ids < set(head.decode().split("\r\n"))
        held.close()
        while (await first_line())[0] != b"HTTP/1.1 200 OK\r\n":  # its end has not come to the server yet
            pass


@pytest.mark.parametrize("size", [2**25, 0])
async def test_a_whole_reply_that_nobody_reads_frees_its_connection(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(listening_of, "_READ_S", 0.2)

    async def answer(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(size or 60_000))

    async with port_of(answer, most=1, silent_s=0.3) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(ASKED * (1 if size else 500))  # many small ones: what waits then is less than a write waits for
        first = b""
        while first != b"HTTP/1.1 200 OK\r\n":  # until there is a place, every other one is told that there is none
            other, asks = await asyncio.open_connection("127.0.0.1", port)
            asks.write(ASKED)
            first = await other.readline()
            asks.close()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2**26)
        writer.close()


async def test_a_whole_reply_that_is_read_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listening_of, "_READ_S", 0.5)
    looks = asyncio.Semaphore(0)
    look = listening_of._Connection._look

    def noted(connection: listening_of._Connection, before: int) -> None:
        look(connection, before)
        looks.release()

    monkeypatch.setattr(listening_of._Connection, "_look", noted)

    async def answer(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(2**25))

    async with port_of(answer, most=1, silent_s=60) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(ASKED)
        await reader.readuntil(b"\r\n\r\n")
        await looks.acquire()
        for _ in range(3):
            await reader.readexactly(2**22)
            await looks.acquire()
        await reader.readexactly(2**25 - 3 * 2**22)
        writer.close()
