"""The kind `http`: sandboxes of another machine, over a small API. `asyncrl sandboxes` is a server of the API.

A sandbox lives as long as the WebSocket that opened it, so nothing is left of a killed worker.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import SandboxCapability, SandboxSettings
from asyncrl.ports import LOOPBACK
from asyncrl.sandboxes.remote import RemoteKind, check_path
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, OnOutput, Sandbox, SandboxError, Stream
from asyncrl.sandboxes.tunnel import Tunnel

API_KEY = "ASYNCRL_SANDBOX_KEY"
"""Environment variable with the key of the server, for server and workers."""

LIMITS = ("cores", "memory_mb", "disk_mb", "processes", "output_mb", "wall_s")
"""Settings that a worker sends."""

STREAMS: dict[bytes, Stream] = {b"o": "stdout", b"e": "stderr"}
"""Marks of frames of output; the last frame has one of the following marks."""

RESULT, FAULT = b"x", b"f"

HEARTBEAT_S = 4.0
_START_S, _CONNECT_S, _PORTS = 120.0, 10.0, 8


class HttpSandbox:
    """See `asyncrl.sandboxes.sandbox.Sandbox`."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.capabilities: frozenset[SandboxCapability] = frozenset()
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._held: aiohttp.ClientWebSocketResponse | None = None
        self._watching: asyncio.Task[None] | None = None
        self._tunnels: list[Tunnel] = []
        self._requests: set[asyncio.Timeout] = set()
        self._path, self._fault = "", "is not started"

    async def start(self) -> None:
        key = os.environ.get(API_KEY, "")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )
        try:
            async with asyncio.timeout(_START_S):
                self._held = await self._session.ws_connect(self._url("/v1/sandboxes"), heartbeat=HEARTBEAT_S)
                await self._held.send_json({name: getattr(self._settings, name) for name in LIMITS})
                opened = await self._held.receive_json()
        except (aiohttp.ClientError, TimeoutError, TypeError, ValueError) as error:
            await self.destroy()
            raise SandboxError(f"{self._settings.url} opens no sandbox: {error or 'no answer in time'}") from error
        except BaseException:
            await self.destroy()
            raise
        if "error" in opened:
            await self.destroy()
            raise SandboxError(f"{self._settings.url} opens no sandbox: {opened['error']}")
        self.capabilities = frozenset(SandboxCapability[name] for name in opened["capabilities"])
        self._path, self._fault = f"/v1/sandboxes/{opened['id']}", ""
        self._watching = asyncio.ensure_future(self._watch(self._held))

    async def _watch(self, held: aiohttp.ClientWebSocketResponse) -> None:
        async for _ in held:
            pass
        self._fault = self._fault or "failed: its server closed the connection"
        for request in self._requests:  # a server that is frozen answers none
            request.reschedule(asyncio.get_running_loop().time())

    def _url(self, path: str) -> str:
        return self._settings.url.rstrip("/") + path

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """End a block with a TimeoutError once the server has closed the connection."""
        async with asyncio.timeout(None) as limit:
            self._requests.add(limit)
            try:
                yield
            finally:
                self._requests.discard(limit)

    @contextlib.asynccontextmanager
    async def _asked(self, method: str, path: str, **options: Any) -> Any:
        """Make a request.

        Raises:
            SandboxError: the sandbox failed, or is not started.
            FileRefused: the sandbox refuses a path.
        """
        if self._session is None or self._fault:
            raise SandboxError(f"the sandbox {self._fault}")
        try:
            async with (
                self._limited(),
                self._session.request(method, self._url(self._path + path), **options) as response,
            ):
                if response.status == 409:
                    raise FileRefused(await response.text())
                if response.status != 200:
                    raise SandboxError(f"the sandbox failed: {response.status} {(await response.text())[:300]}")
                yield response
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as error:
            raise SandboxError(f"the sandbox {self._fault or f'failed: {error}'}") from error

    async def exec(
        self,
        command: Sequence[str],
        *,
        on_output: OnOutput,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        asked = {
            "command": [*command],
            "environment": {**(environment or {})},
            "stdin": base64.b64encode(stdin).decode(),
            "wall_s": self._settings.wall_s if wall_s is None else wall_s,
        }
        async with self._asked("POST", "/exec", json=asked) as response:
            while True:
                head = await response.content.readexactly(5)
                body = await response.content.readexactly(int.from_bytes(head[1:], "big"))
                if (stream := STREAMS.get(head[:1])) is None:
                    break
                on_output(stream, body)
            await response.read()  # its end, after which the connection serves other requests
            if head[:1] == FAULT:
                raise SandboxError(body.decode())
            return msgspec.json.decode(body, type=ExecResult)

    async def put(self, path: str, data: bytes, *, executable: bool = False) -> None:
        check_path(path)
        asked = {"path": path, "executable": str(int(executable))}
        async with self._asked("PUT", "/files", params=asked, data=data):
            pass

    async def get(self, path: str, *, most_bytes: int) -> bytes:
        check_path(path)
        asked = {"path": path, "most_bytes": str(most_bytes)}
        async with self._asked("GET", "/files", params=asked) as response:
            data: bytes = await response.read()
            return data

    async def listen(self) -> socket.socket:
        """Listen in the sandbox, and at the same port here, to which connections are carried."""
        if self._session is None or self._fault:
            raise SandboxError(f"the sandbox {self._fault}")
        for _ in range(_PORTS):
            try:
                carried = await self._session.ws_connect(
                    self._url(f"{self._path}/listen"), heartbeat=HEARTBEAT_S, max_msg_size=0
                )
                port = (await carried.receive_json())["port"]
            except (aiohttp.ClientError, TypeError, ValueError, KeyError) as error:
                raise SandboxError(f"the sandbox failed: {error}") from error
            try:
                listening = socket.create_server((LOOPBACK, port))
            except OSError:  # another process of this machine has the port
                await carried.close()
                continue
            listening.setblocking(False)
            self._tunnels.append(Tunnel(carried, port))
            return listening
        raise SandboxError(f"{_PORTS} ports of a sandbox are taken on this machine; no address is the same in both")

    async def destroy(self) -> None:
        self._fault = "was destroyed"
        for tunnel in self._tunnels:
            await tunnel.close()
        self._tunnels.clear()
        if self._held is not None:
            with contextlib.suppress(aiohttp.ClientError):
                await self._held.close()
        if self._watching is not None:
            await asyncio.wait({self._watching})
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Kind(RemoteKind):
    """See `asyncrl.sandboxes.remote.RemoteKind`."""

    def checks(self, settings: SandboxSettings) -> Iterator[Finding]:
        if not settings.url.startswith(("http://", "https://")):
            message = f'found "{settings.url}", expected the address of `asyncrl sandboxes`: http://host:port'
            yield Finding(("sandbox.url",), message)

    def problem(self, settings: SandboxSettings) -> str:
        return asyncio.run(_problem(settings))

    def capabilities(self) -> frozenset[SandboxCapability]:
        """Return the guarantees of bubblewrap; each server tells its own."""
        return frozenset(SandboxCapability) - {SandboxCapability.LINKS, SandboxCapability.IMAGES}

    def sandbox(self, settings: SandboxSettings) -> Sandbox:
        return HttpSandbox(settings)


async def _problem(settings: SandboxSettings) -> str:
    sandbox = HttpSandbox(settings)
    try:
        await sandbox.start()
    except SandboxError as error:
        return str(error)
    finally:
        await sandbox.destroy()
    return ""


KIND = _Kind()
