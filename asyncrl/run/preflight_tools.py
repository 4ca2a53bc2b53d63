"""Checks of the tools that harnesses and rollout functions give to the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.child_pool.frames import Service, Setup
from asyncrl.config.finding import Finding
from asyncrl.config.harness_settings import HarnessSettings, harness_name, harness_settings
from asyncrl.config.held_out import graded_tasks
from asyncrl.config.settings import Config
from asyncrl.config.tool_settings import AnyTools, ToolSettings
from asyncrl.tools.server import ToolServer

_LIMIT_S = 180.0  # of the start of a server, which may download itself


def check_tools(config: Config, _base: Path) -> Iterator[Finding]:
    """Find tables of tools that cannot work, and harnesses that name others."""
    for name, table in config.tools.items():
        if problem := table.problem():
            yield Finding((f"tools.{name}",), problem)
    for name, harness in _harnesses(config):
        for wanted in harness.tools:
            if wanted not in config.tools:
                known = ", ".join(config.tools) or "none"
                message = f"names [tools.{wanted}]; the config has {known}"
                yield Finding((f"harnesses.{name}.tools",), message)


def tool_setups(tables: Mapping[str, ToolSettings], base: Path) -> dict[tuple[str, ...], Setup]:
    """Return how child processes open each server of tools and read its list, by the keys of the settings."""
    return {
        (f"tools.{name}",): Setup(
            f"tools.{name}",
            f"{__name__}:list_tools",
            {"name": name, "table": msgspec.to_builtins(table), "base": str(base)},
            _LIMIT_S,
        )
        for name, table in tables.items()
        if not table.problem()
    }


def list_tools(name: str, table: dict[str, Any], base: str) -> Service:
    """Open a server and read the list of its tools.

    Raises:
        FunctionError, ToolsUnavailable: the server or a function cannot be had.
    """
    asyncio.run(_listed(ToolServer(name, msgspec.convert(table, AnyTools), Path(base))))
    return Service(lambda _: None)


async def _listed(server: ToolServer) -> None:
    try:
        await server.tools()
    finally:
        await server.close()


def _harnesses(config: Config) -> Iterator[tuple[str, HarnessSettings]]:
    for task in graded_tasks(config).values():
        settings = harness_settings(name := harness_name(task.rollout), config.harnesses)
        if settings is not None:
            yield name, settings
