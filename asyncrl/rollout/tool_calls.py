"""Calls of tools for the policy, recorded by their content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl.errors import FunctionError
from asyncrl.live.apis.schema import Call
from asyncrl.live.difference import Message
from asyncrl.tools.protocol import Tool, ToolResult
from asyncrl.tools.server import Toolbox, ToolServer


class Record(Protocol):
    """Makes a call, or gives its recorded result."""

    async def __call__(
        self, name: str, function: Callable[..., Awaitable[Any]], server: ToolServer, *arguments: Any
    ) -> Any:
        """Return `function(server, *arguments)`, plain data. The name and the arguments identify the call."""


class _Offered(NamedTuple):
    server: ToolServer
    tool: Tool


class ToolCalls:
    """The tools of one trajectory. They stay the same while it lasts, also if a server changes its tools meanwhile."""

    def __init__(self, offered: Mapping[str, _Offered], record: Record) -> None:
        self._offered, self._record = offered, record
        self.tools = [one.tool for one in offered.values()]
        self.calls, self.failures = 0, 0  # so far

    @classmethod
    async def open(cls, toolbox: Toolbox, names: Sequence[str], record: Record) -> ToolCalls:
        """Ask servers for their tools.

        Raises:
            FunctionError: there is no such server, or two of them have a tool of the same name.
            ToolsUnavailable: a server cannot be reached.
        """
        offered: dict[str, _Offered] = {}
        for name in names:
            server = toolbox.server(name)
            for tool in msgspec.convert(await record(f"{name}:list", _plain_tools, server), list[Tool]):
                if tool.name in offered:
                    other = offered[tool.name].server.name
                    raise FunctionError(
                        f"tools.{name} and tools.{other} both have a tool {tool.name}; name the wanted ones in `only`"
                    )
                offered[tool.name] = _Offered(server, tool)
        return cls(offered, record)

    @property
    def schemas(self) -> list[Message]:
        """The tools, as chat templates and OpenAI's API take them."""
        return [tool.schema for tool in self.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. A failure is a result that says why.

        Raises:
            ToolsUnavailable: its server cannot be reached.
        """
        self.calls += 1
        found = self._offered.get(name)
        if found is None:
            result = ToolResult(
                f"there is no tool {name!r}; there are {', '.join(self._offered) or 'none'}", failed=True
            )
        else:
            given = await self._record(f"{found.server.name}.{name}", _plain_result, found.server, name, {**arguments})
            result = ToolResult(*given)
        self.failures += result.failed
        return result

    async def answer(self, calls: Sequence[Call]) -> list[Message]:
        """Make the calls of a reply, at the same time; returns the messages that tell the policy their results."""
        results = await asyncio.gather(*(self.call(call.name, call.arguments) for call in calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text_of(result)}
            for call, result in zip(calls, results, strict=True)
        ]


def text_of(result: ToolResult) -> str:
    """Return a result as the policy reads it."""
    return f"error: {result.text}" if result.failed else result.text


async def _plain_tools(server: ToolServer) -> Any:
    return msgspec.to_builtins(await server.tools())


async def _plain_result(server: ToolServer, name: str, arguments: dict[str, Any]) -> Any:
    return [*await server.call(name, arguments)]
