"""Which requests to scale are open, and what is decided about them: a pure function of the requests and decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from topics.actors import FleetScaled, ScaledBy, ScaleRequested
from topics.roles import SCALABLE, role_of


class Wish(msgspec.Struct):
    """The number of processes that a request names for one pool."""

    count: int
    at: int  # sequence of the request
    by: ScaledBy
    reason: str = ""
    after: int = 0  # sequence of the decision that the request rests on


class ScaleRequests(msgspec.Struct):
    """The newest wish for each pool, and how far they are answered.

    A wish of the rule counts only while no other decision has been taken since the one that it rests on, so it cannot
    undo what a user asked for meanwhile; it is kept apart, so it hides no wish of a user either.
    """

    asked: dict[str, Wish] = {}
    proposed: dict[str, Wish] = {}  # by the rule
    answered: int = 0  # sequence of the newest request that a decision answers
    decided_at: int = 0  # sequence of the newest decision

    def ask(self, request: ScaleRequested, sequence: int) -> None:
        """Take in a request."""
        wishes = self.proposed if request.by == "autoscale" else self.asked
        for pool, count in request.wanted.items():
            if role_of(pool) in SCALABLE:
                wishes[pool] = Wish(count, sequence, request.by, request.reason, request.after)

    def answer(self, decision: FleetScaled, sequence: int) -> None:
        """Take in a decision."""
        self.answered, self.decided_at = max(self.answered, decision.request), sequence

    def decide(self, wanted: Mapping[str, int], most: Callable[[str], int]) -> FleetScaled | None:
        """Return the decision about the oldest open request, one of a user first; None where none is open.

        Args:
            wanted: processes of each pool now; others are no pools of this run.
            most: processes that a pool may have.
        """
        valid = {pool: wish for pool, wish in self.proposed.items() if wish.after == self.decided_at}
        for wishes in (self.asked, valid):
            open_ = {pool: wish for pool, wish in wishes.items() if wish.at > self.answered}
            if open_:
                first = min(open_.values(), key=lambda wish: wish.at)
                counts = {pool: wish.count for pool, wish in open_.items() if wish.at == first.at and pool in wanted}
                counts = {pool: min(count, most(pool)) for pool, count in counts.items()}
                return FleetScaled(counts, by=first.by, reason=first.reason, request=first.at)
        return None
