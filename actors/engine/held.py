"""Which version an engine holds that serves evaluations alone, by the messages of learner and buffer."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from topics.evals import EvalRequested, EvalScored
from topics.weights import WeightsPublished

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
