"""The kind `daytona`: sandboxes of Daytona. `sandbox.image` names a snapshot."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.leftovers import name_of_mine
from asyncrl.sandboxes.shell import Service, ShellKind


class _Service:
    """See `asyncrl.sandboxes.shell.Service`."""

    def __init__(self, client: Any, sandbox: Any) -> None:
        self._client, self._sandbox = client, sandbox

    async def run(self, command: str, limit_s: float) -> str:
        done = await self._sandbox.process.exec(command, timeout=math.ceil(limit_s))
        return str(done.result)

    async def write(self, path: str, data: bytes) -> None:
        await self._sandbox.fs.upload_file(data, path)

    async def close(self) -> None:
        await self._client.delete(self._sandbox)
        await self._client.close()


class _Kind(ShellKind):
    """See `asyncrl.sandboxes.shell.ShellKind`."""

    async def create(self, settings: SandboxSettings) -> Service:
        from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams

        client = AsyncDaytona()
        try:
            sandbox = await client.create(
                CreateSandboxFromSnapshotParams(
                    snapshot=settings.image or None,
                    ephemeral=True,
                    auto_stop_interval=math.ceil(settings.ttl_s / 60),
                    network_block_all=True,
                    labels={"owner": name_of_mine()},
                )
            )
        except BaseException:
            await client.close()
            raise
        return _Service(client, sandbox)


KIND = _Kind("daytona", ["DAYTONA_API_KEY"])
