"""The tools of a trajectory as an MCP server, for programs that take the address of one.

Source: Model Context Protocol 2025-06-18, streamable HTTP without sessions and streams.
"""

from __future__ import annotations

from typing import Any

from asyncrl.rollout.tool_calls import ToolCalls

MCP_PATH = "/mcp"
_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
_UNKNOWN_METHOD, _INVALID = -32601, -32602


async def answer_of(tools: ToolCalls, message: Any) -> dict[str, Any] | None:
    """Return the answer to a message; None if it is no request.

    Raises:
        ToolsUnavailable: the server of a tool cannot be reached.
    """
    if not isinstance(message, dict) or "id" not in message or "method" not in message:
        return None
    method, given = message["method"], message.get("params") or {}
    result: dict[str, Any] | None = None
    if method == "initialize":
        asked = given.get("protocolVersion")
        version = asked if asked in _VERSIONS else _VERSIONS[-1]
        about = {"name": "asyncrl", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif method == "ping":
        result = {}
    elif method == "tools/list":
        named = (
            {"name": one.name, "description": one.description, "inputSchema": one.parameters} for one in tools.tools
        )
        result = {"tools": [*named]}
    elif method == "tools/call":
        name, arguments = given.get("name"), given.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return _error(message, _INVALID, "tools/call needs a name, and arguments that are an object")
        called = await tools.call(name, arguments)
        result = {"content": [{"type": "text", "text": called.text}], "isError": called.failed}
    if result is None:
        return _error(message, _UNKNOWN_METHOD, f"there is no method {method}")
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _error(message: dict[str, Any], code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}}
