"""What inference servers say of themselves."""

from __future__ import annotations

from typing import Any

from topics.topic import ENGINES, Topic
from topics.wire import Message


class EngineUpdating(Message):
    """The server is taking a new version: its requests come back with their partial tokens; hold them."""

    engine_id: str
    line: int
    version: int


class EngineReady(Message):
    """The server has confirmed its version and takes requests."""

    engine_id: str
    address: str
    line: int
    version: int
    digest: str
    slots: int  # requests it runs at once
    update_s: float = 0.0  # seconds from engine.updating to here

    @property
    def key(self) -> str:
        """Name of its weights: `line:version:digest`."""
        return f"{self.line}:{self.version}:{self.digest}"


class EngineGone(Message):
    """The server takes no more requests."""

    engine_id: str
    reason: str


_HEARD = ("rollout", "evaluator", "recorder")

ENGINE_UPDATING = Topic(
    "engine.updating", EngineUpdating, ENGINES, said_by=("engine",), heard_by=_HEARD, key="engine_id"
)
ENGINE_READY = Topic("engine.ready", EngineReady, ENGINES, said_by=("engine",), heard_by=_HEARD, key="engine_id")
ENGINE_GONE = Topic("engine.gone", EngineGone, ENGINES, said_by=("engine",), heard_by=_HEARD, key="engine_id")

TOPICS: tuple[Topic[Any], ...] = (ENGINE_UPDATING, ENGINE_READY, ENGINE_GONE)
