"""The channel `live`: which version is served, which was served before, and the decisions about it.

All of it follows from the logs. A message on the supervisor's own log answers each request or evaluation score once,
and names it. If a supervisor dies before that message is stored, its successor decides again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from actors.supervisor.canary import Canary, as_canary
from actors.supervisor.divergence import Divergence
from actors.supervisor.live_reward import LiveReward
from actors.supervisor.stored_version import StoredVersion
from asyncrl.config.weights_settings import WeightsSettings
from topics.engines import version_of
from topics.evals import EvalScored
from topics.promotions import CanaryEnded, PromotionRefused, PromotionRequested, WeightsCanaried, WeightsPromoted
from topics.turns import Sibling, TurnSkipped
from topics.weights import WeightsRefused

Decision: TypeAlias = WeightsPromoted | WeightsCanaried | CanaryEnded | PromotionRefused
_REFUSALS = 64  # of engines that are remembered; each is of a version that was the newest
_NAMED = 32  # versions in the store that a refusal names, the newest


def absent(version: int, stored: Iterable[StoredVersion]) -> str:
    """Return why the channel does not move to a version that is absent, and which versions it may move to."""
    numbers = ", ".join(map(str, sorted({one.version for one in stored})[-_NAMED:]))
    return f"version {version} is not in the store (there: {numbers or 'none'}); the channel does not change"


class Score(msgspec.Struct, frozen=True):
    """The result of an evaluation: the version that sampled most of its tokens, and its metric."""

    version: int
    value: float | None  # None: the evaluation has no such metric, or no token


class Channel(msgspec.Struct):
    """The state, as plain data."""

    live: list[str] = []  # keys, the newest last: the live version, and those that can be rolled back to
    requests: dict[int, PromotionRequested] = {}  # not answered, by sequence
    scores: dict[int, Score] = {}  # not judged, by sequence of their eval.scored
    evaluated: dict[str, int] = {}  # open evaluations: the version that was asked for
    answered: dict[str, int] = {}  # sequence of the newest request (command) and score (gate) that was answered
    refused: dict[int, str] = {}  # reasons of engines, by sequence of the weights.published; the newest ones
    canary: Canary = msgspec.field(default_factory=Canary)
    divergence: Divergence = msgspec.field(default_factory=Divergence)
    reward: LiveReward = msgspec.field(default_factory=LiveReward)

    def ask(self, request: PromotionRequested, sequence: int) -> None:
        """Take note of a request."""
        if sequence > self.answered.get("command", 0):
            self.requests[sequence] = request

    def score(self, scored: EvalScored, sequence: int, settings: WeightsSettings) -> None:
        """Take note of an evaluation."""
        self.evaluated.pop(scored.eval_id, None)
        metric = settings.gate_metric if scored.dataset == settings.gate_set else ""
        if metric and sequence > self.answered.get("gate", 0):
            tokens = {version: count for version, count in scored.versions.items() if version >= 0 and count}
            version = max(tokens, key=lambda number: (tokens[number], number), default=scored.version)
            value = scored.accuracy if metric == "accuracy" else scored.metrics.get(metric)
            self.scores[sequence] = Score(version, value if tokens else None)

    def refuse(self, refused: WeightsRefused) -> None:
        """Take note of a version whose bytes an engine could not take."""
        self.refused[refused.sequence] = refused.reason
        for sequence in sorted(self.refused)[:-_REFUSALS]:
            del self.refused[sequence]

    def promote(self, message: WeightsPromoted, settings: WeightsSettings) -> None:
        """Move, and keep as many versions to roll back to as the settings want."""
        self.live = message.after(self.live)[-settings.keep_live :]
        self.canary.end()
        self.reward.promoted(settings.reward.turns)
        self.answer("command" if message.by == "rollback" else message.by, message.cause)

    def count(self, end: Sibling | TurnSkipped) -> None:
        """Take note of the end of a turn."""
        self.canary.count(end)
        self.reward.count(end)

    def try_out(self, message: WeightsCanaried, sequence: int) -> None:
        """A canary begins."""
        self.canary.begin(message, sequence)
        self.answer(message.by, message.cause)

    def end_canary(self, message: CanaryEnded) -> None:
        """The canary ends, and nothing else changes."""
        self.canary.end()
        self.answer(message.by, message.cause)

    def answer(self, by: str, cause: int) -> None:
        """Forget the requests and scores that were answered."""
        if by == "newest":
            self.canary.tried = max(cause, self.canary.tried)
        if by == "reward":
            self.reward.moved = 0  # as many turns again, before it is asked for once more
        if by not in ("command", "gate"):
            return
        self.answered[by] = max(cause, self.answered.get(by, 0))
        waiting = self.scores if by == "gate" else self.requests
        for sequence in [sequence for sequence in waiting if sequence <= cause]:
            del waiting[sequence]

    def keeps(self, lineage: int, version: int, window: int, *, exact: bool) -> bool:
        """Return whether a version stays in the store.

        It does while it is live or can be rolled back to, while a request or score of it is not decided, and while an
        open evaluation may be of it. The oldest one may be of the first `window` versions from the one asked for; where
        evaluations are `exact`, the `window` oldest versions that are asked for stay, and no others.
        """
        judged = {one.version for one in self.requests.values()} | {one.version for one in self.scores.values()}
        asked = sorted({*self.evaluated.values()})
        evaluated = version in asked[:window] if exact else bool(asked) and asked[0] <= version < asked[0] + window
        live = any(version_of(key) == (lineage, version) for key in self.live) or self.canary.keeps(lineage, version)
        return live or version in judged or evaluated

    def decide(
        self,
        stored: Sequence[StoredVersion],
        settings: WeightsSettings,
        *,
        serves: bool = False,
        canaries: bool = False,
        kl_bound: float = 0.0,
    ) -> Decision | None:
        """Return the answer to the oldest request or score, or the decision about a canary; None if there is none.

        Args:
            serves: engines answer with the live version: if there is none, the newest version becomes live.
            canaries: engines answer with a canary.
            kl_bound: nats per token from the reference beyond which no version gets users, unless that is forced.
        """
        decision = self._decide(stored, settings, serves=serves, canaries=canaries)
        if not isinstance(decision, WeightsPromoted | WeightsCanaried):
            return decision
        by, why = decision.by, self.divergence.beyond(decision.lineage, decision.version, kl_bound)
        if not why or by == "start" or by == "rollback" or (by == "command" and self.requests[decision.cause].force):
            return decision
        if decision.key in self.live:
            return decision  # back to what users had
        if by == "canary":
            return CanaryEnded(decision.key, "divergence", decision.cause, why)
        if by == "command":
            why = f"{why}; `asyncrl weights promote --force` promotes it all the same"
        return PromotionRefused(by, decision.cause, why)

    def _decide(
        self, stored: Sequence[StoredVersion], settings: WeightsSettings, *, serves: bool, canaries: bool
    ) -> Decision | None:
        if serves and not self.live and stored:
            first = stored[-1]
            return WeightsPromoted(first.lineage, first.version, first.digest, "start", first.sequence)
        if self.requests:
            sequence = min(self.requests)
            decision = self._on_command(sequence, self.requests[sequence].version, stored)
            return self._shared(decision, sequence, canaries=canaries) if self.requests[sequence].share else decision
        if self.scores:
            sequence = min(self.scores)
            return self._scored(self._on_score(sequence, self.scores[sequence], stored, settings), settings)
        return self._of_canary(stored, settings)

    def _of_canary(self, stored: Sequence[StoredVersion], settings: WeightsSettings) -> Decision | None:
        """Return the decision about the canary. Without a canary, return the move that live reward asks for, or the
        newest version as the next canary."""
        if self.canary.open is not None:
            key = self.canary.open.key
            refusals = [self.refused[one.sequence] for one in stored if one.key == key and one.sequence in self.refused]
            known = [one.sequence not in self.refused for one in stored if one.key == key]
            return self.canary.decide(settings.canary, refusals[-1] if refusals and not any(known) else "")
        known_good = [one for one in stored if one.sequence not in self.refused]
        if (move := self.reward.decide(self.live, known_good, settings.reward)) is not None:
            return move
        if not (settings.canary.newest and stored and self.live):
            return None
        newest, live = stored[-1], version_of(self.live[-1])
        if newest.sequence <= self.canary.tried or newest.sequence in self.refused:
            return None
        if (newest.lineage, newest.version) <= live:
            return None
        promoted = WeightsPromoted(newest.lineage, newest.version, newest.digest, "command", newest.sequence)
        return as_canary(promoted, self.live[-1], share=settings.canary.share, by="newest")

    def _shared(
        self, decision: WeightsPromoted | CanaryEnded | PromotionRefused, sequence: int, *, canaries: bool
    ) -> Decision:
        """Turn what a request would promote into a canary."""
        if not isinstance(decision, WeightsPromoted):
            return decision
        if not canaries:
            return PromotionRefused("command", sequence, "no engines have canaries; gateway.canary_engines names them")
        request = self.requests[sequence]
        return as_canary(decision, self.live[-1], share=request.share, owner=request.owner, shadow=request.shadow)

    def _scored(self, decision: WeightsPromoted | PromotionRefused, settings: WeightsSettings) -> Decision:
        """Turn a gate's promotion into a canary, if `weights.canary.share` asks for one."""
        if not (isinstance(decision, WeightsPromoted) and settings.canary.share):
            return decision
        if self.canary.open is not None:
            why = f"version {decision.version} passes, and {self.canary.open.key} is a canary still"
            return PromotionRefused("gate", decision.cause, why)
        return as_canary(decision, self.live[-1], share=settings.canary.share)

    def _on_command(
        self, sequence: int, version: int | None, stored: Sequence[StoredVersion]
    ) -> WeightsPromoted | CanaryEnded | PromotionRefused:
        if version is not None:
            return self._to(version, stored, "command", sequence)
        if self.canary.open is not None:
            return CanaryEnded(self.canary.open.key, "command", sequence, "asked to roll back")
        if len(self.live) < 2:
            return PromotionRefused("command", sequence, "there is no version before to go back to")
        lineage, number = version_of(self.live[-2])
        digest = self.live[-2].split(":")[2]
        return WeightsPromoted(lineage, number, digest, "rollback", sequence, f"from {self.live[-1]}")

    def _on_score(
        self, sequence: int, score: Score, stored: Sequence[StoredVersion], settings: WeightsSettings
    ) -> WeightsPromoted | PromotionRefused:
        metric, least, version = settings.gate_metric, settings.gate_threshold, score.version
        if score.value is None:
            return PromotionRefused("gate", sequence, f"the evaluation of version {version} has no {metric}")
        words = f"{metric} of version {version} is {score.value:g}, weights.gate_threshold is {least:g}"
        if not score.value >= least:  # not a number is no result either
            return PromotionRefused("gate", sequence, words)
        if self.live and version_of(self.live[-1])[1] >= version:
            return PromotionRefused("gate", sequence, f"version {version} is not newer than {self.live[-1]}")
        lineages = sorted({one.lineage for one in stored if one.version == version})
        if len(lineages) > 1:
            words = f"version {version} is on lineages {lineages}, and an evaluation does not name one"
            return PromotionRefused("gate", sequence, f"{words}; asyncrl weights promote takes the newest")
        return self._to(version, stored, "gate", sequence, words)

    def _to(
        self,
        version: int,
        stored: Sequence[StoredVersion],
        by: Literal["command", "gate"],
        cause: int,
        reason: str = "",
    ) -> WeightsPromoted | PromotionRefused:
        found = next((one for one in reversed(stored) if one.version == version), None)
        if found is None:
            return PromotionRefused(by, cause, absent(version, stored))
        if found.sequence in self.refused:
            why = f"an engine refused version {version}: {self.refused[found.sequence]}"
            return PromotionRefused(by, cause, why)
        if self.live and self.live[-1] == found.key:
            return PromotionRefused(by, cause, f"version {version} is live already")
        return WeightsPromoted(found.lineage, found.version, found.digest, by, cause, reason)
