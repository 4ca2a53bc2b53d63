"""Connections of a gateway, on the event loop that it has: which are closed, and what is said to one too many."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvloop
from aiohttp import web

from actors.gateway import http_server as listening_of
from actors.gateway.http_server import listening
from actors.gateway.reply import Answered
from asyncrl.ports import Listen, free_port

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
    async with listening(app, Listen("127.0.0.1", port := free_port()), most=most, silent_s=silent_s):
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
    go_on, answered = asyncio.Event(), asyncio.Semaphore(0)

    async def answer(_http: web.Request) -> web.StreamResponse:
        answered.release()
        await go_on.wait()
        return web.Response(text="whole")

    async with port_of(answer, most=2, silent_s=60) as port, asyncio.timeout(LIMIT_S):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in clients:
            writer.write(ASKED)
            await answered.acquire()
        reader, _refused = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        error = json.loads(body)
        assert "too many connections" in error["error"]["message"]
        ids = {f"{name}: {error['request_id']}" for name in ("request-id", "x-request-id")}
        assert ids < set(head.decode().split("\r\n"))
        go_on.set()
        for reader, _ in clients:
            assert b"200 OK" in await reader.readuntil(b"whole")
        assert await first_line(port) == b"HTTP/1.1 200 OK\r\n"


HALF = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"


@pytest.mark.parametrize("begun", [b"", ASKED[:-2], HALF], ids=["nothing", "half a head", "half a body"])
async def test_clients_that_are_silent_keep_out_nobody(begun: bytes):
    read, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        read.release()
        if await http.read():
            await go_on.wait()
        return web.Response(text="whole")

    async with port_of(answer, most=2, silent_s=60) as port, asyncio.timeout(LIMIT_S):
        patient, waits = await asyncio.open_connection("127.0.0.1", port)
        waits.write(HALF + b"whole")
        await read.acquire()
        for _ in range(3):  # each of which has the one place that is left
            silent, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            if begun is HALF:
                await read.acquire()
            assert await first_line(port) == b"HTTP/1.1 200 OK\r\n"
            with contextlib.suppress(ConnectionError):
                assert await silent.read() == b""
            writer.close()
            await read.acquire()
        go_on.set()
        assert b"200 OK" in await patient.readuntil(b"whole")
        waits.close()


async def first_line(port: int) -> bytes:
    """Ask, and return the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASKED)
    line = await reader.readline()
    writer.close()
    return line


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


async def test_a_port_that_closes_answers_connections_whose_request_is_not_whole_and_ends_them():
    read = asyncio.Semaphore(0)

    async def answer(http: web.Request) -> web.StreamResponse:
        read.release()
        await http.read()
        return web.Response(text="whole")

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    place = Listen("127.0.0.1", free_port())
    async with asyncio.timeout(LIMIT_S), listening(app, place, most=9, silent_s=60) as opened:
        new, half, idle = [await asyncio.open_connection(*place) for _ in range(3)]
        for (_, writer), begun in ((half, HALF), (idle, ASKED)):
            writer.write(begun)
            await read.acquire()
        await idle[0].readuntil(b"whole")
        opened.close()
        assert await idle[0].read() == b""
        for (reader, writer), rest in ((new, ASKED), (half, b"whole")):
            writer.write(rest)
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 200 OK") and b"Connection: close" in reply
        with pytest.raises(OSError):
            await asyncio.open_connection(*place)
        for _, writer in (new, half, idle):
            writer.close()
