"""Settings of tools that the policy calls."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from asyncrl.config.setting_types import Positive, Seconds, Settings


class ToolSettings(Settings, tag_field="kind"):
    """Settings of every table of tools."""

    only: list[str] = msgspec.field(default_factory=list)  # Names of the tools that the policy may call; empty: all.
    # Names of tools whose result depends on nothing but their arguments and that change nothing: results are cached,
    # and a call is repeated if its server ends.
    pure: list[str] = msgspec.field(default_factory=list)
    concurrency: Positive = 8  # Calls at once, for each rollout worker; further calls wait.
    time_limit_s: Seconds = 60.0  # Seconds after which a call has failed. The policy reads that as the result.
    result_characters: Positive = 8_000  # Greatest length of a result; the middle of a longer one is left out.

    def problem(self) -> str:
        """Return why these settings cannot work, or ""."""
        return ""


class McpSettings(ToolSettings, tag="mcp"):
    """The tools of an MCP server: a program that speaks over its standard streams, or an address."""

    # Program and arguments of a server; each rollout worker runs one, outside of any sandbox.
    command: list[str] = msgspec.field(default_factory=list)
    environment: dict[str, str] = msgspec.field(default_factory=dict)  # Further variables of that program.
    url: str = ""  # Address of a server that speaks streamable HTTP, instead of `command`.
    api_key_file: str = ""  # File with the API key of that server, if it needs one.

    def problem(self) -> str:
        if bool(self.command) == bool(self.url):
            return f"found command = {self.command} and url = {self.url!r}; expected one of the two"
        if self.url and not self.url.startswith(("http://", "https://")):
            return f"found url = {self.url!r}; expected http://host:port/path"
        return ""


class PythonToolsSettings(ToolSettings, tag="python"):
    """Annotated functions as tools: names, types and docstrings describe them. They run in the rollout worker, plain
    functions in threads.
    """

    # Each `path/to/file.py:function` or `package.module:function`.
    functions: list[str] = msgspec.field(default_factory=list)

    def problem(self) -> str:
        return "" if self.functions else "functions is empty; expected path/to/file.py:function"


AnyTools: TypeAlias = McpSettings | PythonToolsSettings
KINDS: dict[str, type[ToolSettings]] = {
    str(kind.__struct_config__.tag): kind for kind in (McpSettings, PythonToolsSettings)
}
"""By the names in configs: `connect` of the module `asyncrl.tools.NAME` opens each."""
