"""The gate of live reward: the rewards of turns move the channel `live` to newer versions, and back."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from topics.engines import version_of
from topics.promotions import WeightsPromoted
from topics.turns import Sibling, TurnSkipped

if TYPE_CHECKING:
    from actors.supervisor.stored_version import StoredVersion
    from asyncrl.config.live_settings import RewardGateSettings

_KEPT = 1024  # rewards


class LiveReward(msgspec.Struct):
    """The newest rewards of turns, and what users got before the version that is live; plain data."""

    rewards: list[tuple[int, float]] = []  # with the newest version of the turn's tokens, the newest last
    before: float | None = None  # mean of the newest turns when the channel moved last; None: too few were known
    moved: int = 0  # rewards since then

    def count(self, end: Sibling | TurnSkipped) -> None:
        """Take note of the end of a turn that was graded."""
        if end.version >= 0 and end.reward is not None:
            self.rewards = [*self.rewards, (end.version, end.reward)][-_KEPT:]
            self.moved += 1

    def promoted(self, turns: int) -> None:
        """Take note that the channel moved, and remember the mean reward of the newest turns, to compare with."""
        newest = [reward for _, reward in self.rewards[-turns:]] if turns else []
        self.before, self.moved = fmean(newest) if newest and len(newest) == turns else None, 0

    def decide(
        self, live: Sequence[str], stored: Sequence[StoredVersion], settings: RewardGateSettings
    ) -> WeightsPromoted | None:
        """Return the move that live reward asks for; None if it asks for no move.

        Args:
            live: keys, the newest last: the live version, and those that can be rolled back to.
            stored: versions in the store, the newest last.
        """
        if not (settings.turns and live):
            return None
        now = version_of(live[-1])[1]
        own = [reward for version, reward in self._since() if version == now][-settings.turns :]
        if len(own) == settings.turns and self.before is not None and len(live) > 1:
            words = f"mean reward of its newest {len(own)} turns {fmean(own):.4g}, before it {self.before:.4g}"
            if fmean(own) < self.before - settings.margin:
                cause = next((one.sequence for one in stored if one.key == live[-1]), 0)
                return _move(live[-2], cause, f"back from {live[-1]}: {words}")
        known = fmean(own) if len(own) == settings.turns else self.before
        return self._forward(now, known, stored, settings)

    def _forward(
        self, now: int, known: float | None, stored: Sequence[StoredVersion], settings: RewardGateSettings
    ) -> WeightsPromoted | None:
        """Return the move to a newer version whose turns are not worse.

        Args:
            now: the live version.
            known: mean reward of the live version, or of the one before it.
        """
        ahead = [(version, reward) for version, reward in self._since() if version > now][-settings.turns :]
        if len(ahead) < settings.turns:
            return None
        mean, newest = fmean(reward for _, reward in ahead), max(version for version, _ in ahead)
        found = next((one for one in reversed(stored) if one.version == newest), None)
        if found is None or (known is not None and mean < known - settings.margin):
            return None
        before = "none are known of before" if known is None else f"of what users had before {known:.4g}"
        words = f"mean reward of {len(ahead)} turns of versions up to it {mean:.4g}, {before}"
        return _move(found.key, found.sequence, f"{words}; weights.reward.margin is {settings.margin:g}")

    def _since(self) -> list[tuple[int, float]]:
        """Return what came since the channel moved."""
        return self.rewards[-self.moved :] if self.moved else []


def _move(key: str, cause: int, reason: str) -> WeightsPromoted:
    lineage, version = version_of(key)
    return WeightsPromoted(lineage, version, key.split(":")[2], "reward", cause, reason)
