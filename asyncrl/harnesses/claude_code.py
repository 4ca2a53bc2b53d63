"""The harness `claude-code`: Claude Code works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.harness_settings import ClaudeCodeSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Harness, HarnessKind

_ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "IS_SANDBOX": "1",
}


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: ClaudeCodeSettings, base: Path) -> Harness:
        words = [settings.program, "-p", INSTRUCTION, "--dangerously-skip-permissions", "--model", "policy"]
        return Command([*words, *settings.arguments], _ENVIRONMENT, {})


KIND = _Kind()
