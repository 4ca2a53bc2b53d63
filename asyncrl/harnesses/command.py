"""The harness `command`: any program that takes the address and key of a model from its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.harness_settings import CommandSettings
from asyncrl.harnesses.harness import Attempt, Harness, HarnessFailed, HarnessKind
from asyncrl.shortened import shortened

if TYPE_CHECKING:
    from asyncrl.rollout.endpoint import Endpoint

INSTRUCTION = "{prompt}"
"""The part of an argument that becomes the prompt of the row."""


class Command:
    """A program that runs once. See `asyncrl.harnesses.harness.Harness`."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        files: Mapping[str, str],
        resume_command: Sequence[str] = (),
    ) -> None:
        self._command, self._environment, self._files = command, environment, files
        self._resume_command = resume_command  # continues from the files of a session

    async def run(self, attempt: Attempt) -> None:
        for path, text in self._files.items():
            await attempt.sandbox.put(path, text.encode())
        words = self._resume_command if attempt.resumed else self._command
        command = [word.replace(INSTRUCTION, attempt.instruction) for word in words]
        environment = {**addresses(attempt.endpoint), **self._environment}
        stdin = b"" if attempt.resumed else attempt.instruction.encode()  # the session has it
        result, output = await attempt.run_own(command, environment=environment, stdin=stdin)
        attempt.context.completion = shortened(output)
        if result.code:
            stopped = f", stopped by {result.limit}" if result.limit else ""
            raise HarnessFailed(f"{command[0]}: exit code {result.code}{stopped}: {output.strip()[-500:]}")


def addresses(endpoint: Endpoint) -> dict[str, str]:
    """Variables by which the SDKs of OpenAI and Anthropic find an endpoint."""
    host = endpoint.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": host,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        **({"MCP_URL": endpoint.mcp_url} if endpoint.mcp_url else {}),
    }


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: CommandSettings, base: Path) -> Harness:
        return Command(settings.command, settings.environment, settings.files, settings.resume_command)


KIND = _Kind()
