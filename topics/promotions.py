"""Messages about the channel `live`: the version that is served, beside those that are trained with."""

from __future__ import annotations

from typing import Literal

from topics.topic import ACTORS, FLEET, Topic
from topics.wire import Count, Message, Sequence, Version


class PromotionRequested(Message):
    """Request to move the channel `live` to a version, or back to the one before."""

    version: Version | None = None  # of the newest lineage that has it; None: back


class WeightsPromoted(Message):
    """The channel `live` is at this version from here on; it stays in the store while it can be rolled back to."""

    lineage: Count
    version: Version
    digest: str
    by: Literal["command", "gate", "rollback", "start"]  # start: the first one, where engines serve the channel
    cause: Sequence  # of the promotion.requested, eval.scored or (start) weights.published that it follows
    reason: str = ""

    @property
    def key(self) -> str:
        """Name of the version on engines: `lineage:version:digest`."""
        return f"{self.lineage}:{self.version}:{self.digest}"


class PromotionRefused(Message):
    """The channel `live` stays where it is."""

    by: Literal["command", "gate"]
    cause: Sequence  # of the promotion.requested, or of the eval.scored
    reason: str


PROMOTION_REQUESTED = Topic(
    "promotion.requested",
    PromotionRequested,
    ACTORS,
    publishers=("operator",),
    subscribers=("supervisor",),
    repeats=True,
)
WEIGHTS_PROMOTED = Topic(
    "weights.promoted",
    WeightsPromoted,
    FLEET,
    publishers=("supervisor",),
    subscribers=("monitor", "supervisor", "engine"),
    repeats=True,
)
PROMOTION_REFUSED = Topic(
    "promotion.refused",
    PromotionRefused,
    FLEET,
    publishers=("supervisor",),
    subscribers=("monitor", "supervisor"),
    repeats=True,
)
