"""Which version an engine has that does not follow training: of an evaluation, of `live`, of a canary, the first."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.pools import Purpose, purpose_of
from asyncrl.config.settings import Config
from topics.evals import EvalRequested, EvalScored
from topics.promotions import CanaryEnded, WeightsCanaried, WeightsPromoted
from topics.topic import Stream, Topic
from topics.weights import WeightsPublished

_RECENT = 64  # newest versions that are remembered in addition to those that are asked for


class Announced(NamedTuple):
    """A version, and the sequence of its announcement."""

    version: WeightsPublished
    sequence: int  # of its message


Followed = tuple[tuple[Stream, list[Topic[Any]]], ...]


class Versions(Fold):
    """Decides which version an engine shall have, by messages of several logs in any order between them."""

    def __init__(self) -> None:
        self._refused: set[int] = set()  # sequences of announcements whose bytes could not be taken
        self._known: dict[str, WeightsPublished] = {}  # versions, and their base versions, by key

    def wanted(self) -> Announced | None:
        """Return the version to have; None if the present version may stay."""
        raise NotImplementedError

    def chain(self, announced: Announced) -> list[WeightsPublished]:
        """Return the full version that one begins with, the differences from there on, and the version itself."""
        found = [announced.version]
        while (base := self._known.get(found[-1].base)) is not None:
            found.append(base)
        return found[::-1]

    def pass_over(self, announced: Announced) -> None:
        """Want another version than one whose bytes could not be taken."""
        self._refused.add(announced.sequence)

    def _is_taken(self, announced: Announced) -> bool:
        return announced.sequence not in self._refused


class HeldVersions(Versions):
    """The versions of open evaluations (requested and not scored), in the order of the requests.

    Requests and scores lie on different logs: either may be read first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._announced: dict[int, Announced] = {}  # by version, the newest last
        self._open: dict[str, int] = {}  # version by evaluation
        self._scored_early: set[str] = set()  # before the request was read

    def _on_scored(self, scored: EvalScored, _record: Record) -> None:
        if self._open.pop(scored.eval_id, None) is None:
            self._scored_early.add(scored.eval_id)

    def _on_requested(self, request: EvalRequested, _record: Record) -> None:
        if request.eval_id in self._scored_early:
            self._scored_early.discard(request.eval_id)
        else:
            self._open.setdefault(request.eval_id, request.version)

    def _on_published(self, version: WeightsPublished, record: Record) -> None:
        """Take note of a version. An open evaluation of its number stays with the weights that were there before.

        After a rollback the number names other weights; those that answer a refusal are the same once more.
        """
        self._known[version.key] = version
        if version.answers or version.version not in self._open.values() or version.version not in self._announced:
            self._announced.pop(version.version, None)
            self._announced[version.version] = Announced(version, record.sequence)
        self._forget()

    def wanted(self) -> Announced | None:
        """Return the version of the oldest open evaluation that can be had; None if there is none."""
        for version in self._open.values():
            announced = self._announced.get(version)
            if announced is not None and self._is_taken(announced):
                return announced
        return None

    def _forget(self) -> None:
        """Forget versions that are neither recent nor asked for, unless one of those is a difference to them."""
        recent = {*islice(reversed(self._announced), _RECENT), *self._open.values()}
        self._announced = {number: one for number, one in self._announced.items() if number in recent}
        self._known = {one.key: one for announced in self._announced.values() for one in self.chain(announced)}
        self._refused &= {announced.sequence for announced in self._announced.values()}


class LiveVersions(Versions):
    """The version of the channel `live`; where its bytes cannot be taken, the one that was live before."""

    def __init__(self) -> None:
        super().__init__()
        # All of them: an old one may become live again, and may have been announced long before. Each is small.
        self._announced: dict[str, Announced] = {}  # by key, the newest announcement
        self._live: list[str] = []  # keys, the newest last

    def _on_published(self, version: WeightsPublished, record: Record) -> None:
        self._announced[version.key] = Announced(version, record.sequence)
        self._known[version.key] = version

    def _on_promoted(self, message: WeightsPromoted, _record: Record) -> None:
        self._live = message.after(self._live)

    def wanted(self) -> Announced | None:
        for key in reversed(self._live):
            announced = self._announced.get(key)
            if announced is None:
                return None  # its announcement, on another log, is yet to be read
            if self._is_taken(announced):
                return announced
        return None


class CanaryVersions(LiveVersions):
    """The version of the canary; the live version if there is no canary or its bytes cannot be taken."""

    def __init__(self) -> None:
        super().__init__()
        self._canary = ""  # key

    def _on_promoted(self, message: WeightsPromoted, record: Record) -> None:
        self._canary = ""
        super()._on_promoted(message, record)

    def _on_canaried(self, message: WeightsCanaried, _record: Record) -> None:
        self._canary = message.key

    def _on_canary_ended(self, _message: CanaryEnded, _record: Record) -> None:
        self._canary = ""

    def wanted(self) -> Announced | None:
        announced = self._announced.get(self._canary)
        if self._canary and announced is None:
            return None
        if announced is not None and self._is_taken(announced):
            return announced
        return super().wanted()


class FirstVersion(Versions):
    """The version that the run began with: for judges and opponents that training does not change."""

    def __init__(self) -> None:
        super().__init__()
        self._announced: Announced | None = None

    def _on_published(self, version: WeightsPublished, record: Record) -> None:
        """Take note of the first one, and of its bytes that are written once more."""
        if self._announced is None or self._announced.version.key == version.key:
            self._announced = Announced(version, record.sequence)

    def wanted(self) -> Announced | None:
        announced = self._announced
        return announced if announced is not None and self._is_taken(announced) else None


class SecondModel(Versions):
    """No version: the engine has a second model, which is not trained."""

    def wanted(self) -> Announced | None:
        return None


_KINDS: dict[Purpose, type[Versions]] = {
    "evaluations": HeldVersions,
    "live": LiveVersions,
    "canary": CanaryVersions,
    "judges": FirstVersion,
    "rubrics": FirstVersion,
    "opponents": FirstVersion,
}


def is_untrained(config: Config, engine_id: str) -> bool:
    """Return whether no weights are published for an engine: it has the model that it was started with."""
    return not config.trains or bool(config.engine.group_of(engine_id).model)


def versions_of(config: Config, engine_id: str) -> tuple[Versions | None, Followed]:
    """Return the rule for an engine's version, and the topics that it reads; None if the engine follows training."""
    kind = _KINDS.get(purpose_of(config, engine_id))
    if config.engine.group_of(engine_id).model:
        kind = SecondModel
    if kind is None:
        return None, ()
    return kind(), tuple((stream, entry.topics) for stream, entry in kind.inputs().items())
