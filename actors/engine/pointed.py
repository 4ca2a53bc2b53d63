"""Which version an engine has that does not follow training: that of an evaluation, of `live`, or of a canary."""

from __future__ import annotations

from typing import Any, Protocol

from actors.engine.held import Announced, HeldVersions
from asyncrl.config.pools import purpose_of
from asyncrl.config.settings import Config
from topics.evals import EVAL_REQUESTED, EVAL_SCORED
from topics.promotions import (
    CANARY_ENDED,
    WEIGHTS_CANARIED,
    WEIGHTS_PROMOTED,
    CanaryEnded,
    WeightsCanaried,
    WeightsPromoted,
)
from topics.topic import BATCHES, FLEET, TRAINING, Stream, Topic
from topics.weights import WEIGHTS_PUBLISHED, WeightsPublished

Followed = tuple[tuple[Stream, list[Topic[Any]]], ...]


class Versions(Protocol):
    """Says which version an engine shall have, by messages of several logs in any order between them."""

    def apply(self, message: Any, sequence: int) -> None:
        """Fold a message in."""
        ...

    def wanted(self) -> Announced | None:
        """Return the version to have; None where it may stay as it is."""
        ...

    def chain(self, announced: Announced) -> list[WeightsPublished]:
        """Return the full version that one begins with, the differences from there on, and the version itself."""
        ...

    def refuse(self, announced: Announced) -> None:
        """Pass over a version whose bytes could not be taken."""


class LiveVersions:
    """The version of the channel `live`; where its bytes cannot be taken, the one that was live before."""

    def __init__(self) -> None:
        # All of them: an old one may become live again, and may have been announced long before. Each is small.
        self._announced: dict[str, Announced] = {}  # by key, the newest announcement
        self._live: list[str] = []  # keys, the newest last
        self._refused: set[int] = set()  # sequences of announcements

    def apply(self, message: WeightsPublished | WeightsPromoted, sequence: int) -> None:
        """See `Versions`."""
        if isinstance(message, WeightsPublished):
            self._announced[message.key] = Announced(message, sequence)
        elif message.by == "rollback":
            del self._live[-1:]
        else:
            self._live.append(message.key)

    def wanted(self) -> Announced | None:
        """See `Versions`."""
        for key in reversed(self._live):
            announced = self._announced.get(key)
            if announced is None:
                return None  # its announcement, on another log, is yet to be read
            if announced.sequence not in self._refused:
                return announced
        return None

    def chain(self, announced: Announced) -> list[WeightsPublished]:
        """See `Versions`."""
        found = [announced.version]
        while (base := self._announced.get(found[-1].base)) is not None:
            found.append(base.version)
        return found[::-1]

    def refuse(self, announced: Announced) -> None:
        """See `Versions`."""
        self._refused.add(announced.sequence)


class CanaryVersions(LiveVersions):
    """The version of the canary; where there is none, or its bytes cannot be taken, the one that is live."""

    def __init__(self) -> None:
        super().__init__()
        self._canary = ""  # key

    def apply(self, message: WeightsPublished | WeightsPromoted | WeightsCanaried | CanaryEnded, sequence: int) -> None:
        """See `Versions`."""
        if isinstance(message, WeightsPublished):
            super().apply(message, sequence)
            return
        self._canary = message.key if isinstance(message, WeightsCanaried) else ""
        if isinstance(message, WeightsPromoted):
            super().apply(message, sequence)

    def wanted(self) -> Announced | None:
        """See `Versions`."""
        announced = self._announced.get(self._canary)
        if self._canary and announced is None:
            return None
        if announced is not None and announced.sequence not in self._refused:
            return announced
        return super().wanted()


def versions_of(config: Config, engine_id: str) -> tuple[Versions | None, Followed]:
    """Return what an engine's version follows, and the topics that say so; None where it follows training."""
    match purpose_of(config, engine_id):
        case "evaluations":
            topics = [WEIGHTS_PUBLISHED, EVAL_REQUESTED]
            return HeldVersions(), ((TRAINING, topics), (BATCHES, [EVAL_SCORED]))
        case "live":
            return LiveVersions(), ((TRAINING, [WEIGHTS_PUBLISHED]), (FLEET, [WEIGHTS_PROMOTED]))
        case "canary":
            moves = [WEIGHTS_PROMOTED, WEIGHTS_CANARIED, CANARY_ENDED]
            return CanaryVersions(), ((TRAINING, [WEIGHTS_PUBLISHED]), (FLEET, moves))
    return None, ()
