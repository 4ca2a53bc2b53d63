"""The channel `live`: which version is served, what it was before, and what is to be decided about it.

All of it follows from the logs. A request, or the score of an evaluation, is answered once, by a message on the
supervisor's own log that names it: a supervisor that dies before that message is there decides anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.config.settings import WeightsSettings
from topics.engines import version_of
from topics.evals import EvalScored
from topics.promotions import PromotionRefused, PromotionRequested, WeightsPromoted
from topics.weights import WeightsRefused

_REFUSALS = 64  # of engines that are remembered; each is of a version that was the newest


class Stored(msgspec.Struct, frozen=True):
    """A version in the store."""

    lineage: int
    version: int
    digest: str
    sequence: int  # of its weights.published


class Score(msgspec.Struct, frozen=True):
    """The result of an evaluation: the version that sampled most of its tokens, and its metric."""

    version: int
    value: float | None  # None: the evaluation has no such metric, or no token


class Channel(msgspec.Struct):
    """The state, as plain data."""

    live: list[str] = []  # keys, the newest last: what is live, and what can be rolled back to
    requests: dict[int, int | None] = {}  # not answered: version, or None for the one before, by sequence
    scores: dict[int, Score] = {}  # not judged, by sequence of their eval.scored
    evaluated: dict[str, int] = {}  # open evaluations: the version that was asked for
    answered: dict[str, int] = {}  # sequence of the newest request (command) and score (gate) that was answered
    refused: dict[int, str] = {}  # reasons of engines, by sequence of the weights.published; the newest ones

    def ask(self, request: PromotionRequested, sequence: int) -> None:
        """Take note of a request."""
        if sequence > self.answered.get("command", 0):
            self.requests[sequence] = request.version

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

    def promote(self, message: WeightsPromoted, keep: int) -> None:
        """Move, and keep as many versions to roll back to as `weights.keep_live` wants."""
        self.live = self.live[:-1] if message.by == "rollback" else [*self.live, message.key][-keep:]
        if message.by != "start":
            self.answer("gate" if message.by == "gate" else "command", message.cause)

    def answer(self, by: str, cause: int) -> None:
        """Forget what was decided."""
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
        judged = [*self.requests.values(), *(score.version for score in self.scores.values())]
        asked = sorted({*self.evaluated.values()})
        evaluated = version in asked[:window] if exact else bool(asked) and asked[0] <= version < asked[0] + window
        live = any(version_of(key) == (lineage, version) for key in self.live)
        return live or version in judged or evaluated

    def decide(
        self, stored: Sequence[Stored], settings: WeightsSettings, *, serves: bool = False
    ) -> WeightsPromoted | PromotionRefused | None:
        """Return the answer to the oldest request or score; None where there is none.

        Args:
            serves: engines answer with what is live: where nothing was, the newest version becomes so.
        """
        if serves and not self.live and stored:
            first = stored[-1]
            return WeightsPromoted(first.lineage, first.version, first.digest, "start", first.sequence)
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
            return self._to(version, stored, "command", sequence)
        if len(self.live) < 2:
            return PromotionRefused("command", sequence, "there is no version before to go back to")
        lineage, number = version_of(self.live[-2])
        digest = self.live[-2].split(":")[2]
        return WeightsPromoted(lineage, number, digest, "rollback", sequence, f"from {self.live[-1]}")

    def _on_score(
        self, sequence: int, score: Score, stored: Sequence[Stored], settings: WeightsSettings
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
        stored: Sequence[Stored],
        by: Literal["command", "gate"],
        cause: int,
        reason: str = "",
    ) -> WeightsPromoted | PromotionRefused:
        found = next((one for one in reversed(stored) if one.version == version), None)
        if found is None:
            return PromotionRefused(
                by, cause, f"version {version} is not in the store; `asyncrl weights list` prints what is"
            )
        if found.sequence in self.refused:
            why = f"an engine refused version {version}: {self.refused[found.sequence]}"
            return PromotionRefused(by, cause, why)
        if self.live and self.live[-1] == f"{found.lineage}:{found.version}:{found.digest}":
            return PromotionRefused(by, cause, f"version {version} is live already")
        return WeightsPromoted(found.lineage, found.version, found.digest, by, cause, reason)
