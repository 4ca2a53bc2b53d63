"""A server of sandboxes of this machine: the API of the kind `http`."""

from __future__ import annotations

import asyncio
import base64
import itertools
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.http import FAULT, HEARTBEAT_S, LIMITS, RESULT, STREAMS
from asyncrl.sandboxes.remote import sandbox_of
from asyncrl.sandboxes.sandbox import FileRefused, Sandbox, SandboxError
from asyncrl.sandboxes.tunnel import Carried

_FILE_BYTES = 1 << 30
_MARKS = {stream: mark for mark, stream in STREAMS.items()}


class SandboxServer:
    """Opens sandboxes for workers, no more than a number at once; each ends with the connection that opened it."""

    def __init__(self, settings: SandboxSettings, *, key: str, most: int) -> None:
        """
        Args:
            settings: of the sandboxes; workers may ask for lower limits.
            key: that clients send as bearer token; "": none is needed.
        """
        self._settings, self._key = settings, key
        self._places = asyncio.Semaphore(most)
        self._open: dict[str, Sandbox] = {}

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_FILE_BYTES, middlewares=[self._checked])
        one = "/v1/sandboxes/{id}"
        app.router.add_get("/v1/sandboxes", self._hold)
        app.router.add_post(f"{one}/exec", self._exec)
        app.router.add_put(f"{one}/files", self._put)
        app.router.add_get(f"{one}/files", self._get)
        app.router.add_get(f"{one}/listen", self._listen)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _, _, given = request.headers.get("Authorization", "").partition(" ")
        if self._key and not secrets.compare_digest(given.strip().encode(), self._key.encode()):
            return web.Response(status=401, text="the key is not that of this server")
        try:
            response = await handler(request)
        except FileRefused as error:
            return web.Response(status=409, text=str(error))
        except SandboxError as error:
            return web.Response(status=410, text=str(error))
        except ConnectionResetError:  # the client is gone, and reads no answer
            return web.Response()
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            return web.Response(status=400, text=f"{type(error).__name__}: {error}")
        return response

    def _sandbox(self, http: web.Request) -> Sandbox:
        found = self._open.get(http.match_info["id"])
        if found is None:
            raise SandboxError("there is no such sandbox here; it has ended")
        return found

    async def _hold(self, http: web.Request) -> web.StreamResponse:
        held = web.WebSocketResponse(heartbeat=HEARTBEAT_S)
        await held.prepare(http)
        settings = _limited(self._settings, await held.receive_json())
        async with self._places:
            sandbox, name = sandbox_of(settings), secrets.token_hex(16)
            try:
                await sandbox.start()
                self._open[name] = sandbox
                capabilities = sorted(one.name for one in sandbox.capabilities)
                await held.send_json({"id": name, "capabilities": capabilities})
                async for _ in held:
                    pass
            except SandboxError as error:
                await held.send_json({"error": str(error)})
            finally:
                self._open.pop(name, None)
                await asyncio.shield(sandbox.destroy())
        await held.close()
        return held

    async def _exec(self, http: web.Request) -> web.StreamResponse:
        sandbox, asked = self._sandbox(http), msgspec.json.decode(await http.read())
        response, pieces = web.StreamResponse(), asyncio.Queue[bytes]()
        await response.prepare(http)
        program = asyncio.ensure_future(
            sandbox.exec(
                asked["command"],
                on_output=lambda stream, piece: pieces.put_nowait(_frame(_MARKS[stream], piece)),
                stdin=base64.b64decode(asked["stdin"]),
                environment=asked["environment"],
                wall_s=asked["wall_s"],
            )
        )
        program.add_done_callback(lambda _: pieces.put_nowait(b""))
        try:
            while piece := await pieces.get():
                await response.write(piece)
            try:
                last = _frame(RESULT, msgspec.json.encode(program.result()))
            except SandboxError as error:  # the head of the answer is sent already
                last = _frame(FAULT, str(error).encode())
            await response.write(last)
        finally:
            program.cancel()  # its client is gone
            await asyncio.wait({program})
        await response.write_eof()
        return response

    async def _put(self, http: web.Request) -> web.StreamResponse:
        asked = http.query
        await self._sandbox(http).put(asked["path"], await http.read(), executable=asked["executable"] == "1")
        return web.Response()

    async def _get(self, http: web.Request) -> web.StreamResponse:
        asked = http.query
        return web.Response(body=await self._sandbox(http).get(asked["path"], most_bytes=int(asked["most_bytes"])))

    async def _listen(self, http: web.Request) -> web.StreamResponse:
        listening = await self._sandbox(http).listen()
        carrier = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=0)
        await carrier.prepare(http)
        await _carry(carrier, listening)
        return carrier


async def _carry(carrier: web.WebSocketResponse, listening: socket.socket) -> None:
    """Carry the connections of a listening socket until the worker closes the WebSocket."""
    carried, numbers = Carried(carrier), itertools.count()
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        await carried.carry(next(numbers), reader, writer)

    server = await asyncio.start_server(connected, sock=listening)
    try:
        await carrier.send_json({"port": listening.getsockname()[1]})
        async for message in carrier:
            if message.type == aiohttp.WSMsgType.BINARY:
                await carried.take(message.data)
    finally:
        server.close()
        carried.close()
        for task in [*connections]:
            task.cancel()


def _frame(mark: bytes, body: bytes) -> bytes:
    return mark + len(body).to_bytes(4, "big") + body


def _limited(settings: SandboxSettings, asked: Mapping[str, Any]) -> SandboxSettings:
    """Return settings with the limits that a worker asks for, as far as they are not above those of the server."""
    lower = {name: min(getattr(settings, name), type(getattr(settings, name))(asked[name])) for name in LIMITS}
    return msgspec.structs.replace(settings, **lower)
