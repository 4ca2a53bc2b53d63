"""The harness `codex`: Codex works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.harness_settings import CodexSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Attempt, Harness, HarnessKind

_CONFIG = """model = "policy"
model_provider = "asyncrl"

[model_providers.asyncrl]
name = "asyncrl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_FOLDER = ".codex"
_WORDS = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", INSTRUCTION]


class _Codex:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, attempt: Attempt) -> None:
        files = {f"{_FOLDER}/config.toml": _CONFIG.format(base_url=attempt.endpoint.base_url)}
        words = ["sh", "-c", f'CODEX_HOME="$PWD/{_FOLDER}" exec "$@"', "sh", *self._command]
        await Command(words, {}, files).run(attempt)


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: CodexSettings, base: Path) -> Harness:
        return _Codex([settings.program, *_WORDS, *settings.arguments])


KIND = _Kind()
