"""The harness `claude-code`: Claude Code works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path

from asyncrl.child_pool.frames import Setup
from asyncrl.config.harness_settings import ClaudeCodeSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Harness

_ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "IS_SANDBOX": "1",
}


class _Kind:
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: ClaudeCodeSettings, base: Path) -> Harness:
        words = [settings.program, "-p", INSTRUCTION, "--dangerously-skip-permissions", "--model", "policy"]
        return Command([*words, *settings.arguments], _ENVIRONMENT, {})

    def setup(self, settings: ClaudeCodeSettings, base: Path, limit_s: float) -> Setup | None:
        return None


KIND = _Kind()
