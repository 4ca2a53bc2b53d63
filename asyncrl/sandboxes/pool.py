"""The sandboxes of a rollout worker: started with pauses after refusals, used again, and ended for certain."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.rollout.journal import outside
from asyncrl.sandboxes.kinds import new_sandbox, settings_of_row
from asyncrl.sandboxes.sandbox import Sandbox, SandboxError
from asyncrl.sandboxes.served import ServedSandbox

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


@dataclass
class _Life:
    """Age and uses of a sandbox."""

    uses: int = 0
    born_s: float = field(default_factory=time.monotonic)


class SandboxPool:
    """Opens sandboxes, each for one use at a time.

    A sandbox that is refused is asked for again, after pauses of random length that double. One that does not end is
    told to end again, until it has, or `sandbox.ttl_s` is over, at which services end it.
    """

    def __init__(self, settings: SandboxSettings, vitals: dict[str, float] | None = None) -> None:
        """
        Args:
            vitals: of the worker, into which the pool counts.
        """
        self.fault = ""  # why the newest sandbox was refused; "" once one started
        self._settings = settings
        self._vitals = {} if vitals is None else vitals
        self._free: list[Sandbox] = []  # emptied, for another use
        self._lives: dict[Sandbox, _Life] = {}  # of those that exist
        self._left: set[Sandbox] = set()  # which did not end
        self._starts = asyncio.Semaphore(settings.starts)
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self, *, links: Mapping[str, str] | None = None, image: str = "") -> AsyncIterator[Sandbox]:
        """Give an empty sandbox, and take it back at the end.

        Args:
            links, image: as of `open_sandbox`; then the sandbox is new and has no other use.

        Raises:
            SandboxError: none starts within `sandbox.start_limit_s`.
        """
        with outside():  # tasks of the pool are no branches of a rollout function
            own = settings_of_row(self._settings, links=links, image=image)
            sandbox = await (self._take() if own == self._settings else self._start(own))
        try:
            yield sandbox
        finally:
            with outside():
                await asyncio.shield(self._take_back(sandbox, again=own == self._settings))

    async def close(self) -> None:
        """Destroy the sandboxes that wait, and those in use."""
        self._free.clear()
        for task in self._tasks:
            task.cancel()
        sandboxes = [*self._lives, *self._left]
        await asyncio.gather(*self._tasks, *map(_ended, sandboxes), return_exceptions=True)
        self._lives, self._left = {}, set()

    async def _take(self) -> Sandbox:
        while self._free:
            sandbox = self._free.pop()
            works = not isinstance(sandbox, ServedSandbox) or sandbox.works
            if works and not self._is_old(sandbox):
                self._lives[sandbox].uses += 1
                return sandbox
            await self._destroy(sandbox)
        return await self._start(self._settings)

    async def _take_back(self, sandbox: Sandbox, *, again: bool) -> None:
        """
        Args:
            again: whether the sandbox is one for any row.
        """
        uses = 1 if self._settings.links else self._settings.uses  # links lead into the folders of one use
        life = self._lives.get(sandbox)
        again = again and life is not None and life.uses < uses and not self._is_old(sandbox)
        if again and isinstance(sandbox, ServedSandbox) and await sandbox.empty():
            self._free.append(sandbox)
        else:
            await self._destroy(sandbox)

    def _is_old(self, sandbox: Sandbox) -> bool:
        return time.monotonic() - self._lives[sandbox].born_s > self._settings.ttl_s

    async def _start(self, settings: SandboxSettings) -> Sandbox:
        """Start a sandbox, again with pauses while that fails."""
        until_s, pause_s = time.monotonic() + settings.start_limit_s, _FIRST_PAUSE_S
        while True:
            sandbox = await new_sandbox(settings)
            starting = asyncio.ensure_future(self._started(sandbox))
            try:
                await asyncio.shield(starting)
                break
            except asyncio.CancelledError:  # it may exist all the same, and then has no user
                self._keep(self._discard(starting, sandbox))
                raise
            except SandboxError as error:
                self._refused(str(error))
                pause_s, pause = min(2 * pause_s, _LONGEST_PAUSE_S), pause_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause > until_s:
                    limit = f"none started within sandbox.start_limit_s = {settings.start_limit_s:g}"
                    raise SandboxError(f"{limit}; the last reason: {error}") from error
                await asyncio.sleep(pause)
        self.fault = ""
        self._vitals.pop("sandbox_refused_at_s", None)
        self._lives[sandbox] = _Life(uses=1)
        self._count("sandbox_starts")
        return sandbox

    async def _started(self, sandbox: Sandbox) -> None:
        async with self._starts:
            await sandbox.start()

    async def _discard(self, starting: asyncio.Future[None], sandbox: Sandbox) -> None:
        await asyncio.wait({starting})
        await self._destroy(sandbox)

    def _refused(self, reason: str) -> None:
        self.fault = reason
        self._vitals.setdefault("sandbox_refused_at_s", time.time())
        self._count("sandbox_refusals")

    async def _destroy(self, sandbox: Sandbox) -> None:
        life = self._lives.pop(sandbox, _Life())
        if not await _ended(sandbox):
            self._left.add(sandbox)
            self._keep(self._end(sandbox, life.born_s + self._settings.ttl_s))
        self._count("sandbox_ends")

    async def _end(self, sandbox: Sandbox, until_s: float) -> None:
        """Tell a sandbox to end until it has, or its service has ended it."""
        pause_s, ended = _FIRST_PAUSE_S, False
        while not ended and time.monotonic() < until_s:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            ended = await _ended(sandbox)
        self._left.discard(sandbox)
        self._count("sandbox_ends", 0)

    def _count(self, name: str, by: int = 1) -> None:
        self._vitals[name] = self._vitals.get(name, 0) + by
        self._vitals["sandboxes"], self._vitals["sandboxes_left"] = len(self._lives), len(self._left)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ended(sandbox: Sandbox) -> bool:
    """Destroy a sandbox; returns whether it has ended."""
    try:
        await sandbox.destroy()
    except SandboxError:
        return False
    return True
