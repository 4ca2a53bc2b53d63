"""Messages about inference servers."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from topics.ids import weights_name
from topics.topic import ACTORS, ENGINES, Topic
from topics.wire import Count, Id, Message, Seconds, Version

_KEY = re.compile(r"(\d{1,9}):(\d{1,9}):", re.ASCII)
ANNOUNCED = "engine-at-"  # prefix of the names of servers that were announced during the run
_HOST = r"(?:[A-Za-z0-9_-]{1,63}\.){0,63}[A-Za-z0-9_-]{1,63}\.?|\[[0-9A-Fa-f:.]{2,45}\]"
# Clients leave out /./ and /../: one server would have many addresses.
_PATH = r"(?:/(?!\.{1,2}(?:/|\Z))[\w.~:@!$&'()*+,;=-]*)*"
_ADDRESS = re.compile(rf"^https?://(?:{_HOST})(?::\d{{1,5}})?{_PATH}\Z", re.ASCII)


def check_address(address: str) -> None:
    """Refuse an invalid engine address.

    Raises:
        ValueError: it is none.
    """
    try:
        well = bool(_ADDRESS.match(address)) and urlsplit(address).port != 0
    except ValueError:  # a port out of range, or brackets around an invalid IP address
        well = False
    if not well:
        raise ValueError(f"{address!r} is no address of an engine; expected http://host:port")


def announced_name(address: str) -> str:
    """The name of a server that is announced during a run: `engine-at-gpu7-30000` for `http://gpu7:30000`.

    Raises:
        ValueError: it is no address of an engine.
    """
    check_address(address)
    parts = urlsplit(address)
    place = re.sub(r"[^a-z0-9]+", "-", f"{parts.hostname}{parts.path}")[:96].strip("-")
    return f"{ANNOUNCED}{place}-{parts.port or (443 if parts.scheme == 'https' else 80)}"


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
    update_s: Seconds = 0.0  # seconds since engine.updating; 0: a router, or the original model
    delta: bool = False  # its files were a difference to the version before
    fetch_s: Seconds = 0.0  # seconds until its host had the version, while it still sampled from the one before
    direct: Annotated[str, Meta(max_length=64)] = ""  # way out of the learner's memory by which it came; "": the store
    fallback: Annotated[str, Meta(max_length=1024)] = ""  # why it came from the store instead of directly
    pause_s: Seconds = 0.0  # of `update_s`, from the abort or pause of its requests until it sampled again
    hold_s: Seconds = 0.0  # of `pause_s`, until the server had stopped
    load_s: Seconds = 0.0  # of `pause_s`, what the load took
    cache: Annotated[str, Meta(max_length=64)] = ""  # distinguishes this loading from another one of the same weights
    adapter: Annotated[str, Meta(max_length=1024)] = ""  # name that requests give to be answered by them; "": none

    @property
    def key(self) -> str:
        """Name of its weights: `lineage:version:digest`."""
        return weights_name(self.lineage, self.version, self.digest)

    @property
    def cache_key(self) -> str:
        """The key of its prefix cache: what the server has cached before it confirmed these weights is not reused."""
        return f"{self.key}:{self.cache}" if self.cache else self.key


@lru_cache(64)
def version_of(key: str) -> tuple[int, int]:
    """Lineage and version of weights by their name, `lineage:version:digest`.

    Raises:
        ValueError: it is no such name; servers of other owners may have any.
    """
    found = _KEY.match(key)
    if found is None:
        raise ValueError(f"{key[:80]!r} is no name of weights; expected lineage:version:digest")
    return int(found[1]), int(found[2])


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

    def check(self) -> None:
        """Refuse an announcement under the name of another server.

        Raises:
            ValueError: the name is not the one of the address, or the address is none.
        """
        if self.engine_id != (expected := announced_name(self.address)):
            raise ValueError(f"{self.engine_id} is announced at {self.address}, expected the name {expected}")


class EngineWithdrawn(Message):
    """Request to stop sampling from an external server; its requests move to other engines."""

    engine_id: Id


_PUBLISHERS = ("engine", "router")  # a router is one engine for those that sample
_SUBSCRIBERS = ("rollout", "gateway", "judge", "reward", "groupreward", "router", "recorder", "supervisor")

ENGINE_UPDATING = Topic(EngineUpdating, ENGINES, _PUBLISHERS, _SUBSCRIBERS, key="engine_id", repeats=True)
ENGINE_READY = Topic(EngineReady, ENGINES, _PUBLISHERS, ("learner", *_SUBSCRIBERS), key="engine_id", repeats=True)
ENGINE_GONE = Topic(EngineGone, ENGINES, _PUBLISHERS, _SUBSCRIBERS, key="engine_id", repeats=True)
ENGINE_ANNOUNCED = Topic(
    EngineAnnounced, ACTORS, ("operator",), ("supervisor", "engine"), key="engine_id", repeats=True
)
ENGINE_WITHDRAWN = Topic(EngineWithdrawn, ACTORS, ("operator",), ("supervisor",), key="engine_id", repeats=True)
