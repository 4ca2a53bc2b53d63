"""The channel `live`: which version is served, what it was before, and what is to be decided about it.

All of it follows from the logs. A request, or the score of an evaluation, is answered once, by a message on the
supervisor's own log that names it; whoever dies before that message is there decides anew, and after it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.config.settings import WeightsSettings
from topics.engines import version_of
from topics.evals import EvalScored
from topics.promotions import PromotionRefused, PromotionRequested, WeightsPromoted


class Stored(msgspec.Struct, frozen=True):
    """A version in the store."""

    lineage: int
    version: int
    digest: str


class Score(msgspec.Struct, frozen=True):
    """The result of an evaluation: the version that sampled most of its tokens, and its metric."""

    version: int
    value: float | None  # None: the evaluation has no such metric


class Channel(msgspec.Struct):
    """The state, as plain data."""

    live: list[str] = []  # keys, the newest last, without those that were rolled back from
    promoted: set[tuple[int, int]] = set()  # lineage and version of all that ever were live
    requests: dict[int, int | None] = {}  # not answered: version, or None for the one before, by sequence
    scores: dict[int, Score] = {}  # not judged, by sequence of their eval.scored
    evaluated: dict[str, int] = {}  # open evaluations: the version that was asked for
    answered: dict[str, int] = {}  # sequence of the newest request (command) and score (gate) that was answered

    def ask(self, request: PromotionRequested, sequence: int) -> None:
        """Take note of a request."""
        if sequence > self.answered.get("command", 0):
            self.requests[sequence] = request.version

    def score(self, scored: EvalScored, sequence: int, metric: str) -> None:
        """Take note of an evaluation."""
        self.evaluated.pop(scored.eval_id, None)
        if metric and sequence > self.answered.get("gate", 0):
            tokens = scored.versions
            version = max(tokens, key=lambda number: (tokens[number], number)) if tokens else scored.version
            value = scored.accuracy if metric == "accuracy" else scored.metrics.get(metric)
            self.scores[sequence] = Score(version, value)

    def promote(self, message: WeightsPromoted) -> None:
        """Move."""
        self.promoted.add((message.lineage, message.version))
        self.live = self.live[:-1] if message.by == "rollback" else [*self.live, message.key]
        self.answer("gate" if message.by == "gate" else "command", message.cause)

    def answer(self, by: str, cause: int) -> None:
        """Forget what was decided."""
        self.answered[by] = max(cause, self.answered.get(by, 0))
        waiting = self.scores if by == "gate" else self.requests
        for sequence in [sequence for sequence in waiting if sequence <= cause]:
            del waiting[sequence]

    def keeps(self, lineage: int, version: int) -> bool:
        """Return whether a version stays in the store: it was live, or a request or evaluation of it is not decided."""
        judged = [*self.requests.values(), *(score.version for score in self.scores.values())]
        return (
            (lineage, version) in self.promoted
            or version in judged
            or version >= min(self.evaluated.values(), default=version + 1)
        )

    def decide(self, stored: Sequence[Stored], settings: WeightsSettings) -> WeightsPromoted | PromotionRefused | None:
        """Return the answer to the oldest request or score; None where there is none."""
        if self.requests:
            sequence = min(self.requests)
            return self._on_command(sequence, self.requests[sequence], stored)
        if self.scores:
            sequence = min(self.scores)
            return self._on_score(sequence, self.scores[sequence], stored, settings)
        return None

    def _on_command(
        self, sequence: int, version: int | None, stored: Sequence[Stored]
    ) -> WeightsPromoted | PromotionRefused:
        if version is not None:
            return self._to(version, stored, "command", sequence) or PromotionRefused(
                "command", sequence, f"version {version} is not in the store; asyncrl weights list prints what is"
            )
        if len(self.live) < 2:
            return PromotionRefused("command", sequence, "there is no version before to go back to")
        lineage, number = version_of(self.live[-2])
        return WeightsPromoted(
            lineage, number, self.live[-2].split(":")[2], "rollback", sequence, f"from {self.live[-1]}"
        )

    def _on_score(
        self, sequence: int, score: Score, stored: Sequence[Stored], settings: WeightsSettings
    ) -> WeightsPromoted | PromotionRefused:
        metric, least = settings.gate_metric, settings.gate_threshold
        if score.value is None:
            return PromotionRefused("gate", sequence, f"the evaluation of version {score.version} has no {metric}")
        words = f"{metric} of version {score.version} is {score.value:g}, weights.gate_threshold is {least:g}"
        if score.value < least:
            return PromotionRefused("gate", sequence, words)
        if self.live and version_of(self.live[-1])[1] >= score.version:
            return PromotionRefused("gate", sequence, f"version {score.version} is not newer than {self.live[-1]}")
        return self._to(score.version, stored, "gate", sequence, words) or PromotionRefused(
            "gate", sequence, f"version {score.version} is not in the store"
        )

    def _to(
        self,
        version: int,
        stored: Sequence[Stored],
        by: Literal["command", "gate"],
        cause: int,
        reason: str = "",
    ) -> WeightsPromoted | None:
        found = next((one for one in reversed(stored) if one.version == version), None)
        if found is None:
            return None
        return WeightsPromoted(found.lineage, found.version, found.digest, by, cause, reason)
