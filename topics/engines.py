"""Messages about inference servers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from topics.topic import ACTORS, ENGINES, Topic
from topics.wire import Count, Id, Message, Seconds, Version


class EngineUpdating(Message):
    """The server is taking a new version: its requests come back with their partial tokens; hold them."""

    engine_id: Id
    lineage: Count
    version: Version
    found: Annotated[str, Meta(max_length=1024)] = ""  # name of weights that another client gave it since it was ready


class EngineReady(Message):
    """The server has confirmed its version and takes requests."""

    engine_id: Id
    address: Annotated[str, Meta(max_length=1024)]
    lineage: Count
    version: Version
    digest: str
    slots: Annotated[int, Meta(ge=1, le=2**20)]  # requests it runs at once
    update_s: Seconds = 0.0  # seconds from engine.updating to here; 0: a router, or a model that is served as it is
    delta: bool = False  # its files were a difference to the version before
    fetch_s: Seconds = 0.0  # seconds until its host had the version, while it still sampled from the one before
    cache: Annotated[str, Meta(max_length=64)] = ""  # distinguishes this loading from another one of the same weights

    @property
    def key(self) -> str:
        """Name of its weights: `lineage:version:digest`."""
        return f"{self.lineage}:{self.version}:{self.digest}"

    @property
    def cache_key(self) -> str:
        """The key of its prefix cache: what the server has cached before it confirmed these weights is not reused."""
        return f"{self.key}:{self.cache}" if self.cache else self.key


def version_of(key: str) -> tuple[int, int]:
    """Lineage and version of weights by their name, `lineage:version:digest`."""
    lineage, version, _ = key.split(":", 2)
    return int(lineage), int(version)


class EngineGone(Message):
    """The server takes no more requests."""

    engine_id: Id
    reason: str
    asked: bool = False  # to leave


class EngineAnnounced(Message):
    """Request to sample from a server of another owner, too: it is never started, stopped or reconfigured."""

    engine_id: Id  # "engine-at-gpu7-30000"
    address: Annotated[str, Meta(max_length=1024)]
    slots: Annotated[int, Meta(ge=1, le=2**20)] = 256  # requests it runs at once


class EngineWithdrawn(Message):
    """Request to sample from a server of another owner no more; what runs there goes on elsewhere."""

    engine_id: Id


_PUBLISHERS = ("engine", "router")  # a router is one engine for those that sample
_SUBSCRIBERS = ("rollout", "router", "recorder", "supervisor")

ENGINE_UPDATING = Topic(
    "engine.updating",
    EngineUpdating,
    ENGINES,
    publishers=_PUBLISHERS,
    subscribers=_SUBSCRIBERS,
    key="engine_id",
    repeats=True,
)
ENGINE_READY = Topic(
    "engine.ready",
    EngineReady,
    ENGINES,
    publishers=_PUBLISHERS,
    subscribers=("learner", *_SUBSCRIBERS),
    key="engine_id",
    repeats=True,
)
ENGINE_GONE = Topic(
    "engine.gone", EngineGone, ENGINES, publishers=_PUBLISHERS, subscribers=_SUBSCRIBERS, key="engine_id", repeats=True
)
ENGINE_ANNOUNCED = Topic(
    "engine.announced",
    EngineAnnounced,
    ACTORS,
    publishers=("operator",),
    subscribers=("supervisor", "engine"),
    key="engine_id",
    repeats=True,
)
ENGINE_WITHDRAWN = Topic(
    "engine.withdrawn",
    EngineWithdrawn,
    ACTORS,
    publishers=("operator",),
    subscribers=("supervisor",),
    key="engine_id",
    repeats=True,
)
