"""Which version an engine has that does not follow training: that of an evaluation, of `live`, or of a canary."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple, Protocol

from asyncrl.config.pools import purpose_of
from asyncrl.config.settings import Config
from topics.evals import EVAL_REQUESTED, EVAL_SCORED, EvalRequested, EvalScored
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

_RECENT = 64  # newest versions that are remembered besides those that are asked for


class Announced(NamedTuple):
    """A version, and where it was announced."""

    version: WeightsPublished
    sequence: int  # of its message


class HeldVersions:
    """The versions of open evaluations (requested and not scored), in the order of the requests.

    Requests and scores lie on different logs: either may be read first.
    """

    def __init__(self) -> None:
        self._announced: dict[int, Announced] = {}  # by version, the newest last
        self._known: dict[str, WeightsPublished] = {}  # these and what they are differences to, by key
        self._open: dict[str, int] = {}  # version by evaluation
        self._scored_early: set[str] = set()  # before the request was read
        self._refused: set[int] = set()  # sequences of announcements whose bytes could not be taken

    def apply(self, message: WeightsPublished | EvalRequested | EvalScored, sequence: int) -> None:
        """Fold a message in."""
        if isinstance(message, WeightsPublished):
            self._publish(Announced(message, sequence))
        elif isinstance(message, EvalScored):
            if self._open.pop(message.eval_id, None) is None:
                self._scored_early.add(message.eval_id)
        elif message.eval_id in self._scored_early:
            self._scored_early.discard(message.eval_id)
        else:
            self._open.setdefault(message.eval_id, message.version)

    def _publish(self, announced: Announced) -> None:
        """Take note of a version. An open evaluation of its number stays with the weights that were there before.

        After a rollback the number names other weights; those that answer a refusal are the same once more.
        """
        version = announced.version
        self._known[version.key] = version
        if version.answers or version.version not in self._open.values() or version.version not in self._announced:
            self._announced.pop(version.version, None)
            self._announced[version.version] = announced
        self._forget()

    def refuse(self, announced: Announced) -> None:
        """Pass over a version whose bytes could not be taken."""
        self._refused.add(announced.sequence)

    def wanted(self) -> Announced | None:
        """Return the version of the oldest open evaluation that can be had; None where there is none."""
        for version in self._open.values():
            announced = self._announced.get(version)
            if announced is not None and announced.sequence not in self._refused:
                return announced
        return None

    def chain(self, announced: Announced) -> list[WeightsPublished]:
        """Return the full version that one begins with, the differences from there on, and the version itself."""
        found: list[WeightsPublished] = []
        version: WeightsPublished | None = announced.version
        while version is not None:
            found.append(version)
            version = self._known.get(version.base) if version.base else None
        return found[::-1]

    def _forget(self) -> None:
        """Forget versions that are neither recent nor asked for, unless one of those is a difference to them."""
        recent = {*islice(reversed(self._announced), _RECENT), *self._open.values()}
        self._announced = {number: one for number, one in self._announced.items() if number in recent}
        self._known = {one.key: one for announced in self._announced.values() for one in self.chain(announced)}
        self._refused &= {announced.sequence for announced in self._announced.values()}


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
