"""The kind `python`: annotated functions."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.tool_settings import PythonToolsSettings
from asyncrl.errors import EnvironmentFault, FunctionError
from asyncrl.functions import is_async, load_function
from asyncrl.tools.protocol import Tool, ToolResult

_REFERENCE = "#/$defs/{name}"


class PythonTool(NamedTuple):
    """A function as a tool."""

    tool: Tool
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]  # the parameters of the function

    @classmethod
    def of(cls, function: Callable[..., Any], spec: str) -> PythonTool:
        """
        Raises:
            FunctionError: a parameter has no type, or one that JSON cannot give.
        """
        fields: list[Any] = []
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise FunctionError(f"{spec}: a type of it cannot be found: {error}") from error
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise FunctionError(
                    f"{spec}: the parameter {name} has no type; a tool needs one for each, such as {name}: str"
                )
            fields.append(
                (name, hints[name]) if parameter.default is parameter.empty else (name, hints[name], parameter.default)
            )
        try:
            named = msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)
            [_], parts = msgspec.json.schema_components([named], ref_template=_REFERENCE)
        except (TypeError, ValueError) as error:
            raise FunctionError(f"{spec}: {error}; the arguments of a tool are values of JSON") from error
        parameters = parts.pop(named.__name__)
        parameters.pop("title", None)
        tool = Tool(
            function.__name__, inspect.getdoc(function) or "", {**parameters, **({"$defs": parts} if parts else {})}
        )
        return cls(tool, function, named)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the function with checked arguments."""
        try:
            given = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError as error:
            return ToolResult(f"invalid arguments of {self.tool.name}: {error}", failed=True)
        named = {name: getattr(given, name) for name in given.__struct_fields__}
        try:
            if is_async(self.function):
                value = await self.function(**named)
            else:
                value = await asyncio.to_thread(self.function, **named)
            return ToolResult(value if isinstance(value, str) else msgspec.json.encode(value).decode())
        except EnvironmentFault:
            raise
        except (Exception, SystemExit) as error:  # the policy reads the fault of a user's function
            return ToolResult(f"{type(error).__name__}: {error}", failed=True)


class PythonConnection:
    """Functions in this process. See `asyncrl.tools.protocol.ToolConnection`."""

    def __init__(self, tools: list[PythonTool]) -> None:
        self._tools = {one.tool.name: one for one in tools}

    async def tools(self) -> list[Tool]:
        return [one.tool for one in self._tools.values()]

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        return await self._tools[tool].call(arguments)

    async def close(self) -> None:
        """Do nothing: functions have no connection."""


async def connect(settings: PythonToolsSettings, base: Path) -> PythonConnection:
    """See `asyncrl.tools.kinds.connect`."""
    return PythonConnection([PythonTool.of(load_function(spec, base=base), spec) for spec in settings.functions])
