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
_WORDS = ["--dangerously-skip-permissions", "--model", "policy"]
_CONTINUE = "Continue."


class _ClaudeCode:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, program: str, arguments: list[str]) -> None:
        self._program, self._arguments = program, arguments

    async def run(self, attempt: Attempt) -> None:
        asked = ["--continue", _CONTINUE] if attempt.resumed else [INSTRUCTION]
        words, endpoint = [self._program, "-p", *asked, *_WORDS, *self._arguments], attempt.endpoint
        if endpoint.mcp_url:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            servers = {"mcpServers": {"tools": {"type": "http", "url": endpoint.mcp_url, "headers": headers}}}
            words = [*words, "--strict-mcp-config", "--mcp-config", msgspec.json.encode(servers).decode()]
        await Command(words, _ENVIRONMENT, {}, words).run(attempt)


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: ClaudeCodeSettings, base: Path) -> Harness:
        return _ClaudeCode(settings.program, settings.arguments)


KIND = _Kind()
