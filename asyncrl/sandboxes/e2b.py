"""The kind `e2b`: sandboxes of E2B. `sandbox.image` names a template."""

from __future__ import annotations

from typing import Any

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.leftovers import name_of_mine
from asyncrl.sandboxes.shell import Service, ShellKind


class _Service:
    """See `asyncrl.sandboxes.shell.Service`."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def run(self, command: str, limit_s: float) -> str:
        done = await self._sandbox.commands.run(command, timeout=limit_s)
        return str(done.stdout)

    async def write(self, path: str, data: bytes) -> None:
        await self._sandbox.files.write(path, data)

    async def close(self) -> None:
        await self._sandbox.kill()


class _Kind(ShellKind):
    """See `asyncrl.sandboxes.shell.ShellKind`."""

    async def create(self, settings: SandboxSettings) -> Service:
        from e2b import AsyncSandbox

        sandbox = await AsyncSandbox.create(
            template=settings.image or None,
            timeout=round(settings.ttl_s),
            metadata={"owner": name_of_mine()},
            allow_internet_access=False,
        )
        return _Service(sandbox)


KIND = _Kind("e2b", ["E2B_API_KEY"])
