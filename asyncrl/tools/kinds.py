"""The kinds of servers of tools: `connect` of the module of each."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from asyncrl.config.tool_settings import ToolSettings
from asyncrl.tools.protocol import ToolConnection


async def connect(settings: ToolSettings, base: Path) -> ToolConnection:
    """Open a connection to a server of tools.

    Args:
        base: folder that relative paths start from.

    Raises:
        ServerLost: it does not start, or cannot be reached.
        FunctionError: a function cannot be loaded or has no types.
    """
    module = import_module(f"asyncrl.tools.{settings.__struct_config__.tag}")
    connection: ToolConnection = await module.connect(settings, base)
    return connection
