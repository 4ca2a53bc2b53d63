"""Adapters that SGLang adds to its model at each token, loaded under names of which every request gives one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.engine.errors import EngineRefused
from asyncrl.engine.starting import EngineFailed

if TYPE_CHECKING:
    from asyncrl.engine.client import EngineClient


class Shape(NamedTuple):
    """The adapters of a run."""

    run: str  # its id
    rank: int
    targets: tuple[str, ...]  # last names of the projections that have one

    @property
    def arguments(self) -> list[str]:
        """Arguments of SGLang that give it room for one version, and the next."""
        room = ["--max-lora-rank", str(self.rank), "--max-loras-per-batch", "2"]
        return ["--enable-lora", *room, "--lora-target-modules", *self.targets]


class ServedAdapters:
    """The adapters of one server."""

    def __init__(self, client: EngineClient, shape: Shape) -> None:
        self._client, self._shape = client, shape

    async def check(self) -> None:
        """Check that a server which its owner has started takes these adapters.

        Raises:
            EngineFailed: it does not.
            EngineError: it does not report that.
        """
        info = await self._client.server_info()
        rank, targets = info.get("max_lora_rank"), info.get("lora_target_modules") or []
        missing = sorted({*self._shape.targets} - {*targets}) if "all" not in targets else []
        if not info.get("enable_lora") or not isinstance(rank, int) or rank < self._shape.rank or missing:
            found = (
                f"enable_lora = {info.get('enable_lora')!r}, max_lora_rank = {rank!r}, lora_target_modules = {targets}"
            )
            raise EngineFailed(
                f"{found}; expected a server with {' '.join(self._shape.arguments)}; start it so, or set adapters = "
                '"merged" in its group'
            )

    async def load(self, directory: Path, key: str) -> str:
        """Load an adapter, and call what the server has `key`; those of versions before are removed.

        No request runs: the server is paused, and aborted requests have ended.

        Returns:
            The name that requests give.

        Raises:
            EngineError: the server does not do it.
        """
        own = f"{self._shape.run}/"
        name = f"{own}{key}"
        try:
            loaded = await self._client.load_adapter(name, directory)
        except EngineRefused as refused:
            # It may be there: of an actor before this one, or loaded again by SGLang for a late request.
            try:
                await self._client.unload_adapter(name)
            except EngineRefused:
                raise refused from None
            loaded = await self._client.load_adapter(name, directory)
        await self._client.name_weights(key)
        for other in loaded:
            if other.startswith(own) and other != name:
                await self._client.unload_adapter(other)
        return name
