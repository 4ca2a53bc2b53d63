"""The harness `claude-code`: Claude Code works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config.harness_settings import ClaudeCodeSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Attempt, Harness, HarnessKind

_ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "IS_SANDBOX": "1",
}


class _ClaudeCode:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, attempt: Attempt) -> None:
        words, endpoint = self._command, attempt.endpoint
        if endpoint.mcp_url:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            servers = {"mcpServers": {"tools": {"type": "http", "url": endpoint.mcp_url, "headers": headers}}}
            words = [*words, "--strict-mcp-config", "--mcp-config", msgspec.json.encode(servers).decode()]
        await Command(words, _ENVIRONMENT, {}).run(attempt)


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: ClaudeCodeSettings, base: Path) -> Harness:
        words = [settings.program, "-p", INSTRUCTION, "--dangerously-skip-permissions", "--model", "policy"]
        return _ClaudeCode([*words, *settings.arguments])


KIND = _Kind()
