"""The kind `mcp`: a server that speaks the Model Context Protocol over its standard streams or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.config.tool_settings import McpSettings
from asyncrl.errors import FunctionError
from asyncrl.tools.protocol import ServerLost, Tool, ToolResult

_CLOSED = -32000  # code of an error of the client itself: the connection is closed
_PAGES = 100  # of a list of tools
_Result = TypeVar("_Result")


class McpConnection:
    """A client of the package `mcp`. See `asyncrl.tools.protocol.ToolConnection`.

    A task holds the client: a lost connection cancels the task that has opened it, and no caller.
    """

    def __init__(self, settings: McpSettings, base: Path) -> None:
        self._settings, self._base = settings, base
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.ensure_future(self._hold())
        self._holding.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def open(self) -> None:
        """Wait until the server has answered.

        Raises:
            ServerLost: it does not start, or cannot be reached.
        """
        try:
            await asyncio.wait({self._opened, self._holding}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._holding.cancel()
            raise
        if not self._opened.done():
            raise ServerLost(f"the server does not start: {self._fault()}")

    async def _hold(self) -> None:
        from mcp import Client

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(self._target()))
            self._opened.set_result(client)
            await self._closing.wait()

    def _target(self) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        settings = self._settings
        if settings.command:
            program, *arguments = settings.command
            return StdioServerParameters(
                command=program, args=arguments, env=settings.environment or None, cwd=str(self._base)
            )
        if not settings.api_key_file:
            return settings.url
        headers = {"Authorization": f"Bearer {(self._base / settings.api_key_file).read_text().strip()}"}
        return streamable_http_client(settings.url, http_client=create_mcp_http_client(headers))

    def _fault(self) -> str:
        if not self._holding.done() or self._holding.cancelled():
            return "its connection was closed"
        error: BaseException | None = self._holding.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"{type(error).__name__}: {error}" if error is not None else "its connection was closed"

    async def tools(self) -> list[Tool]:
        from mcp import MCPError

        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            try:
                page = await self._asked(self._opened.result().list_tools(cursor=cursor, cache_mode="bypass"))
            except MCPError as error:
                raise ServerLost(f"the server gives no list of its tools: {error}") from error
            found += [Tool(one.name, one.description or "", one.input_schema) for one in page.tools]
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError

        try:
            result = await self._asked(self._opened.result().call_tool(tool, arguments))
        except MCPError as error:
            if error.error.code == _CLOSED:
                raise ServerLost(str(error)) from error
            return ToolResult(str(error), failed=True)
        except ValueError as error:  # of a structured result that does not have the form that the server declares
            return ToolResult(str(error), failed=True)
        return ToolResult(_text_of(result), failed=bool(result.is_error))

    async def _asked(self, request: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the answer to a request.

        Raises:
            ServerLost: the connection ended before the answer.
        """
        asked = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asked, self._holding}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() or asked.cancelled():
                raise ServerLost(self._fault())
            return asked.result()
        finally:
            asked.cancel()

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._holding})


def _text_of(result: Any) -> str:
    """Return the content of a result as text; of other content its type."""
    texts = [getattr(one, "text", None) or f"[{one.type} left out: the policy reads text]" for one in result.content]
    if not texts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(texts)


async def connect(settings: McpSettings, base: Path) -> McpConnection:
    """See `asyncrl.tools.kinds.connect`."""
    try:
        import mcp  # noqa: F401 - it takes a second and 60 MB, so other runs do not import it
    except ImportError as error:
        raise FunctionError(f'the kind "mcp" needs the package mcp: pip install "asyncrl[mcp]" ({error})') from error
    connection = McpConnection(settings, base)
    await connection.open()
    return connection
