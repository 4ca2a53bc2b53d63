"""The harness `pi`: Pi works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config.harness_settings import PiSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Attempt, Harness, HarnessKind

_FILE = ".pi/agent/models.json"
_WORDS = ["-p", "--offline", "--no-session", "--provider", "asyncrl", "--model", "policy"]


class _Pi:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, attempt: Attempt) -> None:
        provider = {
            "baseUrl": attempt.endpoint.base_url,
            "api": "openai-completions",
            "apiKey": "OPENAI_API_KEY",  # the variable with it
            "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
            "models": [{"id": "policy"}],
        }
        config = msgspec.json.encode({"providers": {"asyncrl": provider}}).decode()
        await Command(self._command, {"PI_OFFLINE": "1"}, {_FILE: config}).run(attempt)


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: PiSettings, base: Path) -> Harness:
        return _Pi([settings.program, *_WORDS, *settings.arguments, INSTRUCTION])


KIND = _Kind()
