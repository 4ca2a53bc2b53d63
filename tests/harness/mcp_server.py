"""An MCP server of tests, as a program: `python mcp_server.py FOLDER [PORT]`."""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests", log_level="CRITICAL")
FOLDER = Path(sys.argv[1])


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    with (FOLDER / "calls").open("a") as file:
        file.write(f"{os.getpid()} {a}+{b}\n")
    return a + b


@server.tool()
def die(once: bool = True) -> str:
    """End the server, the first time."""
    if once and (FOLDER / "died").exists():
        return "lives"
    (FOLDER / "died").touch()
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Give no result."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def long() -> str:
    """Give a long text."""
    return "a" * 100_000


@server.tool()
def change() -> str:
    """Replace `add` by `subtract`."""
    server.remove_tool("add")
    server.add_tool(lambda a, b: str(int(a) - int(b)), name="subtract")
    return "changed"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
