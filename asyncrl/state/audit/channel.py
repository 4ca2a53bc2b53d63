"""The channel `live` in an audit: it moved to published versions alone, each time by a request or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.state.audit.violations import Violation, place_of
from topics.evals import EvalScored
from topics.promotions import PromotionRequested, WeightsCanaried, WeightsPromoted


class Channel(Fold):
    """Collects what moved the channel, and what asked for it: they are on different logs."""

    def __init__(self) -> None:
        self._promoted: list[tuple[str, WeightsPromoted | WeightsCanaried]] = []
        self._canaries: dict[int, str] = {}  # keys of those that may be promoted by themselves, by sequence
        self._requests: dict[int, tuple[int | None, bool]] = {}  # the version, and whether as a shadow, by sequence
        self._scores: set[int] = set()  # sequences

    def _on_requested(self, message: PromotionRequested, record: Record) -> None:
        shadow = message.shadow and message.share > 0  # a request without a share is for all sessions
        self._requests[record.sequence] = message.version, shadow

    def _on_scored(self, _: EvalScored, record: Record) -> None:
        self._scores.add(record.sequence)

    def _on_promoted(self, message: WeightsPromoted, record: Record) -> None:
        self._promoted.append((place_of(record), message))

    def _on_canaried(self, message: WeightsCanaried, record: Record) -> None:
        if not message.shadow:
            self._canaries[record.sequence] = message.key
        self._promoted.append((place_of(record), message))

    def violations(self, published: Mapping[tuple[int, int], str], later: Set[int]) -> Iterator[Violation]:
        """Compare, once everything was read.

        Args:
            published: digests, by lineage and version.
            later: versions published after that log was read.
        """
        for number, (place, message) in enumerate(self._promoted):
            digest = published.get((message.lineage, message.version))
            if digest != message.digest and not (digest is None and message.version in later):
                found = f"version {message.version} of lineage {message.lineage} is live with digest {message.digest}"
                expected = f"digest {digest}, as published" if digest else "a version that was published"
                yield Violation("foreign weights", place, found, expected)
            if not ((message.by == "start" and number == 0) or self._is_asked(message)):
                found = f"version {message.version} by {message.by}, for message {message.cause}"
                yield Violation("unasked promotion", place, found, "a request for it, or the score of an evaluation")

    def _is_asked(self, message: WeightsPromoted | WeightsCanaried) -> bool:
        if message.by in ("newest", "reward"):
            return True  # no single message asks for it; that it was published was compared above
        if message.by == "canary":
            return self._canaries.get(message.cause) == message.key
        if message.by == "gate":  # the newest scores may not have been read
            return message.cause in self._scores or message.cause > max(self._scores, default=0)
        wanted = None if message.by == "rollback" else message.version
        shadow = isinstance(message, WeightsCanaried) and message.shadow
        return self._requests.get(message.cause) == (wanted, shadow)
