"""Control of an embedded server."""

from __future__ import annotations

from pathlib import Path

from asyncrl.engine.control import ServerSpec
from asyncrl.engine.embedded.budget import memory_share
from asyncrl.engine.http_control import OwnControl


class EmbeddedControl(OwnControl):
    """The CPU engine."""

    module = "asyncrl.engine.embedded"
    device = "cpu"
    _keeps = False  # requests while it is held

    def __init__(self, home: ServerSpec) -> None:
        super().__init__(home)
        self.adds = not home.staged  # the staging process reads whole models

    def arguments(self) -> list[str]:
        """Return its command line, with its part of the memory."""
        share = memory_share(self._home.settings, self._home.group)
        return [*super().arguments(), "--mem-fraction-static", f"{share:g}"]

    async def hold(self, *, keep: bool = False) -> None:
        self._keeps = keep
        await super().hold(keep=keep)

    async def drain(self) -> None:
        """End all requests, in the one call that pauses it."""
        await self.pause("abort")

    async def resume(self) -> None:
        """Continue sampling; requests that arrived during the pause were sent for the old weights and are aborted."""
        if not self._keeps:
            await self.abort_all()
        await super().resume()

    async def prepare(self, directory: Path) -> None:
        """Let the server read the weights ahead while it samples, unless a staging process does."""
        if self._staging is None:
            await self.read_weights_ahead(directory)
        await super().prepare(directory)

    async def wait_gap(self) -> None:
        """Wait until no request with a priority runs or waits."""
        if seconds := self._home.gap_s:
            await self._load(f"?wait_idle={seconds:.3f}&priority=1", extra_s=seconds)
