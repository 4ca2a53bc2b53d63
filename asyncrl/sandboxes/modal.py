"""The kind `modal`: sandboxes of Modal. `sandbox.image` names an image of a registry."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.shell import Service, ShellKind

_APP = "asyncrl"
_MIB_OF_MB = 1_000_000 / (1 << 20)


class _Service:
    """See `asyncrl.sandboxes.shell.Service`."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def run(self, command: str, limit_s: float) -> str:
        process = await self._sandbox.exec.aio("sh", "-c", command, timeout=math.ceil(limit_s))
        text = await process.stdout.read.aio()
        await process.wait.aio()
        return str(text)

    async def write(self, path: str, data: bytes) -> None:
        process = await self._sandbox.exec.aio("sh", "-c", f"cat > {shlex.quote(path)}", text=False)
        process.stdin.write(data)
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        await process.wait.aio()

    async def close(self) -> None:
        await self._sandbox.terminate.aio()


class _Kind(ShellKind):
    """See `asyncrl.sandboxes.shell.ShellKind`."""

    def has_keys(self) -> bool:
        """Return whether there is a token in the environment, or in the file of `modal token set`."""
        return super().has_keys() or Path("~/.modal.toml").expanduser().exists()

    async def create(self, settings: SandboxSettings) -> Service:
        import modal

        app = await modal.App.lookup.aio(_APP, create_if_missing=True)
        sandbox = await modal.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=app,
            image=modal.Image.from_registry(settings.image) if settings.image else None,
            timeout=math.ceil(settings.ttl_s),
            block_network=True,
            cpu=float(settings.cores),
            memory=math.ceil(settings.memory_mb * _MIB_OF_MB),
        )
        return _Service(sandbox)


KIND = _Kind("modal", ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"])
