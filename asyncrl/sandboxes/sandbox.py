"""The protocol of sandboxes: programs run in a workspace with limits, and all of it can be destroyed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from asyncrl.config.sandbox_settings import SandboxCapability
from asyncrl.errors import AsyncRLError, EnvironmentFault

Stream: TypeAlias = Literal["stdout", "stderr"]
OnOutput: TypeAlias = Callable[[Stream, bytes], None]
Limit: TypeAlias = Literal["", "wall_s", "output_mb", "processes", "memory_mb"]


class SandboxError(EnvironmentFault):
    """A fault of the sandbox, not of the program in it: the attempt is retried and has no reward."""


class FileRefused(AsyncRLError):
    """A file of a workspace that cannot be read or written: programs in the workspace may be the reason."""


class ExecResult(NamedTuple):
    """The end of a program."""

    code: int  # exit code, as of a shell: 127 for an unknown program, 126 for one that cannot start; -N after signal N
    limit: Limit = ""  # for which the program was killed, or could not start


class Sandbox(Protocol):
    """A workspace and the programs in it.

    Paths start from the workspace, do not leave it, and follow no symbolic links. Use it as `async with`.
    """

    capabilities: frozenset[SandboxCapability]

    async def start(self) -> None:
        """Make the empty workspace.

        Raises:
            SandboxError: it cannot be made.
        """

    async def exec(
        self,
        command: Sequence[str],
        *,
        on_output: OnOutput,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run a program in the workspace. At its end, the processes of its process group end.

        Args:
            command: program and arguments.
            on_output: is given each piece of output when it comes.
            environment: variables of the program, besides `PATH` and `HOME`.
            wall_s: seconds, instead of the setting.

        Raises:
            SandboxError: the sandbox is not started, failed, or was destroyed meanwhile.
        """

    async def put(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file, and make the folders above it.

        Raises:
            FileRefused: the path leaves the workspace or cannot be written.
            SandboxError: the sandbox failed.
        """

    async def get(self, path: str, *, most_bytes: int) -> bytes:
        """Read a regular file.

        Raises:
            FileRefused: the path leaves the workspace, or is no regular file of at most `most_bytes` bytes.
            SandboxError: the sandbox failed.
        """

    async def listen(self) -> socket.socket:
        """Return a listening TCP socket that programs reach at its own address, 127.0.0.1 and a free port.

        The caller accepts connections, and closes the socket.

        Raises:
            SandboxError: the sandbox failed.
        """

    async def destroy(self) -> None:
        """End all programs and remove the workspace. A second call has no effect."""
