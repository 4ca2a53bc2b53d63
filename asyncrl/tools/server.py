"""Servers of tools with their limits: calls at once, time, length of results; a cache, and new connections."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tool_settings import ToolSettings
from asyncrl.errors import FunctionError
from asyncrl.shortened import shortened
from asyncrl.tools.kinds import connect
from asyncrl.tools.protocol import ServerLost, Tool, ToolConnection, ToolResult, ToolsUnavailable

_CACHED = 1_024  # results of one server
_OPENS, _FIRST_PAUSE_S, _OPEN_S = 4, 0.25, 30.0  # tries to open a connection, the pause after the first, and its limit
_CALLS = 3  # of a tool whose server ends, if the tool is pure
_IDLE_S = 1.0  # after which a connection is tried before its use
_ENCODER = msgspec.json.Encoder(order="deterministic")


class ToolServer:
    """One table of tools in one worker: all trajectories share its connection."""

    def __init__(self, name: str, settings: ToolSettings, base: Path) -> None:
        self.name = name
        self._settings, self._base = settings, base
        self._places = asyncio.Semaphore(settings.concurrency)
        self._opening = asyncio.Lock()
        self._connection: ToolConnection | None = None
        self._used_at = 0.0
        self._cache: OrderedDict[tuple[str, bytes], ToolResult] = OrderedDict()
        self._running: dict[ToolConnection, int] = {}  # calls; a lost connection is closed after its last one
        self._closing: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[Tool]:
        """Return the tools that the policy may call now.

        Raises:
            ToolsUnavailable: the server cannot be reached.
            FunctionError: the settings name a tool that the server does not have.
        """
        found = await self._listed()
        only, names = self._settings.only, [tool.name for tool in found]
        if unknown := [name for name in only if name not in names]:
            known = ", ".join(names) or "none"
            raise FunctionError(f"tools.{self.name}.only names {', '.join(unknown)}; the server has {known}")
        return [tool for tool in found if not only or tool.name in only]

    async def _listed(self) -> list[Tool]:
        reason = ""
        for _ in range(_CALLS):
            connection = await self._connected()
            try:
                async with asyncio.timeout(_OPEN_S):
                    return await connection.tools()
            except (ServerLost, TimeoutError) as error:
                self._retire(connection)
                reason = str(error)
        raise ToolsUnavailable(f"tools.{self.name}: the server gives no list of its tools: {reason}")

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; each fault that the policy can act on is a result.

        Raises:
            ToolsUnavailable: the server cannot be reached.
        """
        is_pure, key = tool in self._settings.pure, (tool, _ENCODER.encode(arguments))
        if is_pure and key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        async with self._places:
            result = await self._called(tool, arguments, _CALLS if is_pure else 1)
        result = result._replace(text=shortened(result.text, self._settings.result_characters))
        if is_pure and not result.failed:
            self._cache[key] = result
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return result

    async def _called(self, tool: str, arguments: dict[str, Any], tries: int) -> ToolResult:
        limit_s, lost = self._settings.time_limit_s, ""
        for _ in range(tries):
            connection = await self._connected()
            self._running[connection] = self._running.get(connection, 0) + 1
            try:
                async with asyncio.timeout(limit_s):
                    return await connection.call(tool, arguments)
            except TimeoutError:
                self._retire(connection)  # the server may hang
                return ToolResult(f"{tool} gave no result within {limit_s:g} s", failed=True)
            except ServerLost as error:
                self._retire(connection)
                lost = str(error)
            finally:
                self._used_at = time.monotonic()
                self._left(connection)
        return ToolResult(f"the server of {tool} ended during the call: {lost}", failed=True)

    async def _connected(self) -> ToolConnection:
        """Return a connection; one that was idle is tried first."""
        async with self._opening:
            connection = self._connection
            if connection is not None and time.monotonic() - self._used_at > _IDLE_S:
                try:
                    async with asyncio.timeout(self._settings.time_limit_s):
                        await connection.tools()
                    self._used_at = time.monotonic()
                except (ServerLost, TimeoutError):
                    self._retire(connection)
            if self._connection is None:
                self._connection = await self._opened()
                self._used_at = time.monotonic()
            return self._connection

    async def _opened(self) -> ToolConnection:
        reason = ""
        for number in range(_OPENS):
            if number:
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (number - 1))
            try:
                async with asyncio.timeout(_OPEN_S):
                    return await connect(self._settings, self._base)
            except TimeoutError:
                reason = f"no answer within {_OPEN_S:g} s"
            except (ServerLost, OSError) as error:
                reason = str(error)
        raise ToolsUnavailable(f"tools.{self.name}: {_OPENS} connections failed, the last one: {reason}")

    def _retire(self, connection: ToolConnection) -> None:
        """Give a connection to no further call; it is closed when its calls have ended."""
        if self._connection is connection:
            self._connection = None
        if connection not in self._running:
            self._close(connection)

    def _left(self, connection: ToolConnection) -> None:
        self._running[connection] -= 1
        if not self._running[connection]:
            del self._running[connection]
            if connection is not self._connection:
                self._close(connection)

    def _close(self, connection: ToolConnection) -> None:
        task = asyncio.ensure_future(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End the server."""
        if self._connection is not None:
            self._retire(self._connection)
        if self._closing:
            await asyncio.wait(self._closing)


class Toolbox:
    """The servers of tools of one worker, by the names of their tables."""

    def __init__(self, tables: Mapping[str, ToolSettings], base: Path) -> None:
        """
        Args:
            base: folder that relative paths start from.
        """
        self._servers = {name: ToolServer(name, settings, base) for name, settings in tables.items()}

    def server(self, name: str) -> ToolServer:
        """Return a server by its name.

        Raises:
            FunctionError: there is no such table.
        """
        if name not in self._servers:
            known = ", ".join(self._servers) or "none"
            raise FunctionError(f"the config has no [tools.{name}]; it has {known}")
        return self._servers[name]

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))
