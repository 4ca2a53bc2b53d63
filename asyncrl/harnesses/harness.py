"""The protocol of harnesses: a program works on one row in a sandbox, and samples the policy at an endpoint."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncrl.child_pool.frames import Setup
from asyncrl.errors import AsyncRLError
from asyncrl.rollout.context import RolloutContext
from asyncrl.rollout.tool_calls import ToolCalls
from asyncrl.sandboxes.sandbox import ExecResult, Sandbox, SandboxError
from topics.prompts import PromptRow

if TYPE_CHECKING:
    from asyncrl.rollout.endpoint import Endpoint


class HarnessFailed(AsyncRLError):
    """A program that crashed or took too long; `at_failure` of its settings says what follows."""


class Attempt(NamedTuple):
    """One trajectory: the work, and the places where a harness does it."""

    row: PromptRow
    context: RolloutContext
    endpoint: Endpoint
    sandbox: Sandbox
    tools: ToolCalls
    resumed: bool = False  # the workspace is that of a snapshot: the program continues its session

    @property
    def instruction(self) -> str:
        """The prompt of the row as text."""
        prompt = self.row.prompt
        return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)

    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> tuple[ExecResult, str]:
        """Run a program in the sandbox; returns its end, and both streams of its output as one text.

        Raises:
            SandboxError: the sandbox failed, not the program.
        """
        return await run_in(self.sandbox, command, environment=environment, stdin=stdin)

    async def run_own(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> tuple[ExecResult, str]:
        """Run a program of the harness, which the policy did not write, as `run`.

        Raises:
            SandboxError: also where a signal killed it that no limit of the sandbox sent.
        """
        result, output = await self.run(command, environment=environment, stdin=stdin)
        if result.code == -signal.SIGKILL and not result.limit:
            raise SandboxError(f"{command[0]} was killed, and had reached no limit of the sandbox")
        return result, output


class Harness(Protocol):
    """A program that works on tasks."""

    async def run(self, attempt: Attempt) -> None:
        """Work on a row. The final text of the program may be set as `attempt.context.completion`.

        Raises:
            HarnessFailed: the program crashed.
            SandboxError: the sandbox failed; the attempt is made again.
        """


class HarnessKind:
    """A kind of harnesses: `KIND` of its module."""

    def make(self, settings: Any, base: Path) -> Harness:
        """Return the harness.

        Args:
            base: folder that relative paths start from.

        Raises:
            FunctionError: it names a function that cannot be loaded.
        """
        raise NotImplementedError

    def setup(self, _settings: Any, _base: Path, _limit_s: float) -> Setup | None:
        """Return the setup by which a child process loads the user's function, if there is one."""
        return None


async def run_in(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    wall_s: float | None = None,
) -> tuple[ExecResult, str]:
    """Run a program in a sandbox; returns its end, and both streams of its output as one text."""
    pieces: list[bytes] = []
    result = await sandbox.exec(
        command,
        on_output=lambda _stream, piece: pieces.append(piece),
        environment=environment,
        stdin=stdin,
        wall_s=wall_s,
    )
    return result, b"".join(pieces).decode(errors="replace")
