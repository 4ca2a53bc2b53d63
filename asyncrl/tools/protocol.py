"""The protocol of servers of tools."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl.errors import AsyncRLError, EnvironmentFault


class ToolsUnavailable(EnvironmentFault):
    """A server of tools that cannot be reached: the episode runs again, and its end is no fault of the policy."""


class ServerLost(AsyncRLError):
    """A connection to a server of tools that ended, with or without a call."""


class Tool(msgspec.Struct, frozen=True):
    """A tool, as the policy sees it."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of an object

    @property
    def schema(self) -> dict[str, Any]:
        """Return the form in which chat templates and OpenAI's API take it."""
        return {"type": "function", "function": msgspec.to_builtins(self)}


class ToolResult(NamedTuple):
    """The result of a call."""

    text: str
    failed: bool = False  # the tool is unknown, refused its arguments, or raised; `text` has the reason


class ToolConnection(Protocol):
    """An open connection to one server. Calls may run at the same time."""

    async def tools(self) -> list[Tool]:
        """Return the tools that the server has now.

        Raises:
            ServerLost: the server ended.
        """

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. The caller cancels a call that takes too long.

        Raises:
            ServerLost: the server ended; the call may have had its effect.
        """

    async def close(self) -> None:
        """End the connection, and the server if it was started for it."""
