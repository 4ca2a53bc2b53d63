"""Which sessions are answered by a canary, and whose turns are compared: pure, and the same in every gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from topics.engines import version_of
from topics.promotions import CanaryEnded, WeightsCanaried, WeightsPromoted
from topics.wire import Int32Array


class Arm(NamedTuple):
    """One of the two sides of a comparison, as a turn belongs to it."""

    trial: int = 0  # sequence of the canary's message; 0: nothing is compared
    canary: bool = False
    key: str = ""  # of the weights that sampled its tokens, if it counts
    shadow: int = 0  # sequence of the message of a canary that answers it too, unseen; 0: none does
    version: int = 0  # of that canary

    @property
    def first(self) -> str:
        """Weights whose engines are asked first; "": those of every other request."""
        return self.key if self.canary else ""

    def holds(self, versions: Int32Array, lineages: Sequence[int]) -> bool:
        """Return whether a reply has its tokens from these weights alone, and has any.

        Args:
            versions: [T] of its tokens.
            lineages: of the requests that they came with.
        """
        if not (self.trial and len(versions)):
            return False
        lineage, version = version_of(self.key)
        return bool((versions == version).all()) and set(lineages) == {lineage}


class Trials:
    """The canary of now, by the messages about the channel `live` in their order."""

    def __init__(self) -> None:
        self._open: WeightsCanaried | None = None
        self._trial = 0

    def apply(self, message: WeightsPromoted | WeightsCanaried | CanaryEnded, sequence: int) -> None:
        """Fold a message in."""
        self._open = message if isinstance(message, WeightsCanaried) else None
        self._trial = sequence

    def arm(self, owner: str, session: str) -> Arm:
        """Return the side of a turn: the same for all turns of a session while the canary is open.

        Args:
            owner: of the turn, by `asyncrl.live.tenant_keys`.
            session: its id.
        """
        canary = self._open
        if canary is None or not f"{owner}_".startswith(f"{canary.owner}_" if canary.owner else ""):
            return Arm()
        # The key is part of it: each canary has other sessions.
        drawn = xxhash.xxh3_64_intdigest(f"{canary.key}/{session}".encode()) / 2**64
        answered = drawn < canary.share
        if canary.shadow:
            return Arm(shadow=self._trial, version=canary.version) if answered else Arm()
        return Arm(self._trial, answered, canary.key if answered else canary.against)
