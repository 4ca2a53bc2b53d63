"""Messages about the channel `live`: the version that is served, and a canary that a share of sessions gets."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from topics.topic import ACTORS, FLEET, Topic
from topics.weights import OfVersion
from topics.wire import Message, Sequence, Version

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Owner: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")]


class PromotionRequested(Message):
    """Request to move the channel `live` to a version, or back to the one before."""

    version: Version | None = None  # of the newest lineage that has it; None: back
    share: Share = 0.0  # above 0: as a canary, for this share of the sessions
    owner: Owner = ""  # of those of a tenant or user alone, by `asyncrl.live.tenant_keys`; "": of all
    force: bool = False  # also beyond `live.safety.kl_bound`
    shadow: bool = False  # that share is answered by it as well, and no client gets these answers


class WeightsPromoted(OfVersion):
    """The channel `live` is at this version from here on; it stays in the store while it can be rolled back to."""

    # start: the first one, if engines serve the channel; canary: as good as the live version; reward: by live reward,
    # forward or back.
    by: Literal["command", "gate", "rollback", "start", "canary", "reward"]
    # Of the promotion.requested, eval.scored, weights.canaried or (start, reward) weights.published that it follows.
    cause: Sequence
    reason: str = ""

    def after(self, live: list[str]) -> list[str]:
        """Return the live version after this message as the last key, and earlier versions for rollbacks before it.

        Args:
            live: the same before it.
        """
        back = self.by == "rollback" or (self.by == "reward" and self.key in live[-2:-1])
        return live[:-1] if back else [*live, self.key]


class WeightsCanaried(OfVersion):
    """A share of sessions is answered by this version from here on, until a later message about the channel."""

    against: str  # key of the version that is live, to whose turns its turns are compared
    by: Literal["command", "gate", "newest"]
    cause: Sequence  # of the promotion.requested, eval.scored or (newest) weights.published that it follows
    share: Share  # of the sessions, by a digest of their id
    owner: Owner = ""  # of a tenant or user alone; "": of all
    reason: str = ""
    shadow: bool = False  # the live version answers them; this version answers too, unseen by clients


class CanaryEnded(Message):
    """The canary answers no more sessions; the channel `live` does not move."""

    key: str
    # weights: engines cannot take it; divergence: it is too far from the reference to be promoted.
    by: Literal["reward", "command", "weights", "divergence"]
    cause: Sequence  # of the promotion.requested (command), else of the weights.canaried
    reason: str


class PromotionRefused(Message):
    """The channel `live` does not move."""

    by: Literal["command", "gate", "newest", "reward"]
    cause: Sequence  # of the promotion.requested, the eval.scored, or (newest, reward) the weights.published
    reason: str


PROMOTION_REQUESTED = Topic(PromotionRequested, ACTORS, ("operator",), ("supervisor",), repeats=True)
WEIGHTS_PROMOTED = Topic(
    WeightsPromoted, FLEET, ("supervisor",), ("monitor", "supervisor", "engine", "gateway"), repeats=True
)
WEIGHTS_CANARIED = Topic(
    WeightsCanaried, FLEET, ("supervisor",), ("monitor", "supervisor", "engine", "gateway"), repeats=True
)
CANARY_ENDED = Topic(CanaryEnded, FLEET, ("supervisor",), ("monitor", "supervisor", "engine", "gateway"), repeats=True)
PROMOTION_REFUSED = Topic(PromotionRefused, FLEET, ("supervisor",), ("monitor", "supervisor"), repeats=True)
