"""TCP connections carried by a WebSocket: frames of four bytes that number a connection, and its data; none ends it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeAlias

import aiohttp
from aiohttp import web

from asyncrl.ports import LOOPBACK

Carrier: TypeAlias = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
_NUMBER, _PIECE = 4, 1 << 16


class Carried:
    """One end of carried connections."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send what a connection gives, until it ends."""
        self._writers[number] = writer
        head = number.to_bytes(_NUMBER, "big")
        with contextlib.suppress(OSError, aiohttp.ClientError):
            while data := await reader.read(_PIECE):
                await self._carrier.send_bytes(head + data)
            await self._carrier.send_bytes(head)

    async def take(self, frame: bytes) -> bool:
        """Write a frame to its connection; returns whether the connection is known."""
        number, data = int.from_bytes(frame[:_NUMBER], "big"), frame[_NUMBER:]
        writer = self._writers.get(number)
        if writer is None:
            return False
        with contextlib.suppress(OSError):
            if data:
                writer.write(data)
                await writer.drain()
            else:
                del self._writers[number]
                writer.close()
        return True

    def close(self) -> None:
        """End all connections."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class Tunnel:
    """The end of the worker: a connection to a port of this machine for each of the sandbox."""

    def __init__(self, carrier: aiohttp.ClientWebSocketResponse, port: int) -> None:
        self._carrier, self._port = carrier, port
        self._carried = Carried(carrier)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async for message in self._carrier:
            if message.type == aiohttp.WSMsgType.BINARY and not await self._carried.take(message.data):
                await self._connect(message.data)

    async def _connect(self, frame: bytes) -> None:
        number = int.from_bytes(frame[:_NUMBER], "big")
        if len(frame) == _NUMBER:
            return  # the end of a connection that is closed here
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
        except OSError:
            await self._carrier.send_bytes(frame[:_NUMBER])
            return
        task = asyncio.ensure_future(self._carried.carry(number, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(0)  # the task has begun
        await self._carried.take(frame)

    async def close(self) -> None:
        """End all connections."""
        self._carried.close()
        with contextlib.suppress(aiohttp.ClientError):
            await self._carrier.close()
        for task in (self._running, *self._tasks):
            task.cancel()
        await asyncio.wait({self._running, *self._tasks})
