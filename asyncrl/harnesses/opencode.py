"""The harness `opencode`: OpenCode works on the row, with the policy as its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.harness_settings import OpencodeSettings
from asyncrl.harnesses.command import INSTRUCTION, Command
from asyncrl.harnesses.harness import Attempt, Harness, HarnessKind

_WORDS = ["run", "--model", "asyncrl/policy"]
_ALONE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}


class _Opencode:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, attempt: Attempt) -> None:
        endpoint = attempt.endpoint
        key = "{env:OPENAI_API_KEY}"
        options = {"baseURL": endpoint.base_url, "apiKey": key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {"name": "policy"}}}
        config: dict[str, Any] = {
            "provider": {"asyncrl": provider},
            "model": "asyncrl/policy",
            "small_model": "asyncrl/policy",
            "permission": "allow",
            "share": "disabled",
        }
        if endpoint.mcp_url:
            headers = {"Authorization": f"Bearer {key}"}
            config["mcp"] = {"tools": {"type": "remote", "url": endpoint.mcp_url, "headers": headers, "oauth": False}}
        environment = {**_ALONE, "OPENCODE_CONFIG_CONTENT": msgspec.json.encode(config).decode()}
        await Command(self._command, environment, {}).run(attempt)


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: OpencodeSettings, base: Path) -> Harness:
        return _Opencode([settings.program, *_WORDS, *settings.arguments, INSTRUCTION])


KIND = _Kind()
