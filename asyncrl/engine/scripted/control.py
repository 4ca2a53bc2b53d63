"""Control of a scripted engine."""

from __future__ import annotations

from pathlib import Path

from asyncrl.engine.control import EngineControl, ServerSpec
from asyncrl.engine.server_load import EngineLoad


class ScriptedControl(EngineControl):
    """No server at all: the clients of its address make tokens up, and label them as is announced."""

    adds = True

    def __init__(self, home: ServerSpec) -> None:
        self.address = f"scripted:{home.name}"
        self._label = home.label

    async def health(self) -> bool:
        return True

    async def weights(self) -> tuple[str, str]:
        """Return the last loaded name, without a path."""
        return self._label, ""

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0)

    async def load_weights(self, directory: Path, key: str) -> None:
        self._label = key
