"""The comparison of a canary with the version that is live: the rewards of their turns, and what follows from them.

Each turn that counts names the canary's message (`trial`) in its end on the log of the sessions, so the order in which
that log and the supervisor's own are read changes nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.config.live_settings import CanarySettings
from topics.engines import version_of
from topics.promotions import CanaryEnded, WeightsCanaried, WeightsPromoted
from topics.turns import Sibling, TurnSkipped

_EARLY = 8  # trials whose turns are remembered before their canary's message was read


class Mean(msgspec.Struct):
    """The rewards of turns."""

    turns: int = 0
    total: float = 0.0

    def add(self, reward: float) -> None:
        """Take note of a turn."""
        self.turns += 1
        self.total += reward

    @property
    def value(self) -> float:
        """The mean; 0 without turns."""
        return self.total / max(self.turns, 1)


class Compared(msgspec.Struct):
    """The turns of a canary, and the others of its time."""

    canary: Mean = msgspec.field(default_factory=Mean)
    others: Mean = msgspec.field(default_factory=Mean)


class Canary(msgspec.Struct):
    """The canary that sessions have, and the rewards of turns; plain data."""

    open: WeightsCanaried | None = None
    trial: int = 0  # sequence of its message; of the newest canary's if none is open
    tried: int = 0  # sequence of the newest weights.published that became one by being the newest
    compared: dict[int, Compared] = {}  # by trial

    def begin(self, message: WeightsCanaried, sequence: int) -> None:
        """Take note of a canary; one that is there ends."""
        self.open, self.trial = message, sequence
        if message.by == "newest":
            self.tried = message.cause
        self._forget()

    def end(self) -> None:
        """Forget the canary."""
        self.open = None
        self.compared.pop(self.trial, None)

    def count(self, end: Sibling | TurnSkipped) -> None:
        """Take note of the end of a turn that was graded."""
        known = end.trial > self.trial or (end.trial == self.trial and self.open is not None)
        if end.trial and known and end.reward is not None:
            compared = self.compared.setdefault(end.trial, Compared())
            (compared.canary if end.canary else compared.others).add(end.reward)
            if end.shadow is not None:
                compared.canary.add(end.shadow)
            self._forget()

    def _forget(self) -> None:
        kept = sorted(trial for trial in self.compared if trial >= self.trial)[:_EARLY]
        self.compared = {trial: self.compared[trial] for trial in kept}

    def keeps(self, lineage: int, version: int) -> bool:
        """Return whether a version stays in the store."""
        return self.open is not None and version_of(self.open.key) == (lineage, version)

    def figures(self) -> dict[str, float]:
        """Return vital signs; none without a canary."""
        if self.open is None:
            return {}
        compared = self.compared.get(self.trial, Compared())
        means = {"canary": compared.canary, "others": compared.others}
        found = {"canary_version": float(self.open.version)}
        for name, mean in means.items():
            found |= {f"{name}_turns": float(mean.turns), f"{name}_reward": mean.value}
        return found

    def decide(self, settings: CanarySettings, refusal: str) -> WeightsPromoted | CanaryEnded | None:
        """Return the end or the promotion of the canary; None while it continues.

        Args:
            refusal: why engines cannot take it; "": nothing is known against it.
        """
        message, compared = self.open, self.compared.get(self.trial, Compared())
        if message is None:
            return None
        if refusal:
            return CanaryEnded(message.key, "weights", self.trial, refusal)
        canary, others = compared.canary, compared.others
        if min(canary.turns, others.turns) < settings.turns:
            return None
        words = (
            f"mean reward of its {canary.turns} turns {canary.value:.4g}, of {others.turns} others {others.value:.4g}; "
            f"weights.canary.margin is {settings.margin:g}"
        )
        if not canary.value >= others.value - settings.margin:
            return CanaryEnded(message.key, "reward", self.trial, words)
        if message.shadow:  # no user has seen it: a command promotes it
            return None
        return WeightsPromoted(message.lineage, message.version, message.digest, "canary", self.trial, words)


def as_canary(
    decision: WeightsPromoted, against: str, *, share: float, owner: str = "", **more: Any
) -> WeightsCanaried:
    """Return the canary that a version becomes instead of being promoted at once."""
    names = ("lineage", "version", "digest", "by", "cause", "reason")
    fields: dict[str, Any] = {name: getattr(decision, name) for name in names} | more
    return WeightsCanaried(against=against, share=share, owner=owner, **fields)
