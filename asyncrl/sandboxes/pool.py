"""The sandboxes of a rollout worker: some started ahead, and some used again after they were emptied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.rollout.journal import outside
from asyncrl.sandboxes.kinds import open_sandbox, start_sandbox
from asyncrl.sandboxes.sandbox import Sandbox, SandboxError
from asyncrl.sandboxes.served import ServedSandbox


class SandboxPool:
    """Opens sandboxes, each for one use at a time."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._ready: list[Sandbox] = []
        self._uses: dict[Sandbox, int] = {}  # so far, of those that exist
        self._starting: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(self, *, links: Mapping[str, str] | None = None, image: str = "") -> AsyncIterator[Sandbox]:
        """Give an empty sandbox, and take it back at the end.

        Args:
            links, image: as of `open_sandbox`; then the sandbox is new and has no other use.

        Raises:
            SandboxError: it does not start.
        """
        if links or image:
            async with open_sandbox(self._settings, links=links, image=image) as fresh:
                yield fresh
            return
        with outside():  # tasks of the pool are no branches of a rollout function
            sandbox = await self._take()
        try:
            yield sandbox
        finally:
            with outside():
                await asyncio.shield(self._take_back(sandbox))

    async def close(self) -> None:
        """Destroy the sandboxes that wait, and those in use."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        self._ready.clear()
        sandboxes, self._uses = [*self._uses], {}
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))

    async def _take(self) -> Sandbox:
        sandbox = None
        while self._ready and sandbox is None:
            waiting = self._ready.pop()
            if isinstance(waiting, ServedSandbox) and not waiting.works:
                await self._destroy(waiting)
            else:
                sandbox = waiting
        sandbox = sandbox or await self._start()
        self._uses[sandbox] += 1
        if self._starting is None and len(self._ready) < self._settings.ready:
            self._starting = asyncio.ensure_future(self._fill())
        return sandbox

    async def _take_back(self, sandbox: Sandbox) -> None:
        uses = 1 if self._settings.links else self._settings.uses  # links lead into the folders of one use
        left = uses - self._uses.get(sandbox, uses)
        if left > 0 and isinstance(sandbox, ServedSandbox) and await sandbox.empty():
            self._ready.append(sandbox)
        else:
            await self._destroy(sandbox)

    async def _fill(self) -> None:
        """Start sandboxes ahead. After a failure the next use tries again, and reports the reason."""
        try:
            while len(self._ready) < self._settings.ready:
                self._ready.append(await self._start())
        except SandboxError:
            pass
        finally:
            self._starting = None

    async def _start(self) -> Sandbox:
        sandbox = await start_sandbox(self._settings)
        self._uses[sandbox] = 0
        return sandbox

    async def _destroy(self, sandbox: Sandbox) -> None:
        self._uses.pop(sandbox, None)
        await sandbox.destroy()
