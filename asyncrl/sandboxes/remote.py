"""Sandboxes elsewhere: what their kinds share, and the choice of the class of a sandbox."""

from __future__ import annotations

import socket

from asyncrl.config.sandbox_settings import SandboxCapability, SandboxKind, SandboxSettings, sandbox_kind
from asyncrl.sandboxes.sandbox import FileRefused, Sandbox, SandboxError
from asyncrl.sandboxes.served import ServedSandbox


class RemoteKind(SandboxKind):
    """A kind whose sandboxes do not run on the machine of the worker."""

    def sandbox(self, settings: SandboxSettings) -> Sandbox:
        """Return a sandbox that is not started."""
        raise NotImplementedError


class UnreachableWorker:
    """A part of sandboxes whose programs cannot reach the worker. See `asyncrl.sandboxes.sandbox.Sandbox`."""

    capabilities: frozenset[SandboxCapability]

    async def listen(self) -> socket.socket:
        raise SandboxError("programs of this sandbox cannot reach the worker; take the harness mini or python")


def check_path(path: str) -> None:
    """
    Raises:
        FileRefused: a path leaves the workspace.
    """
    if not all(part not in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise FileRefused(f"{path!r} leaves the workspace of a sandbox; expected a path like folder/file")


def sandbox_of(settings: SandboxSettings) -> Sandbox:
    """Return a sandbox of the kind that the settings name, not started."""
    kind = sandbox_kind(settings.kind)
    return kind.sandbox(settings) if isinstance(kind, RemoteKind) else ServedSandbox(settings)
