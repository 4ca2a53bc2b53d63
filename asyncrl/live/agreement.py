"""How often users agree with judges about the same turns, of the newest ones; plain data that folds keep."""

from __future__ import annotations

import msgspec

NEWEST = 128  # grades about which a user spoke
_ALONE = 1024  # grades that a user may still speak about, and what users said of turns whose grade may still come


class Agreement(msgspec.Struct):
    """Grades of judges, and whether users agreed; lists have the newest entry last."""

    against: list[bool] = []  # by grade about which a user spoke: whether of the other sign
    judged: dict[str, float] = {}  # grades by tenant and turn; 0 once they were compared
    spoken: dict[str, float] = {}  # what users said before a judge did

    def judge(self, turn: str, reward: float) -> None:
        """Take note of a judge's grade; the first of a turn counts."""
        if turn in self.judged:
            return
        self.judged[turn] = reward
        if (score := self.spoken.pop(turn, None)) is not None:
            self._compare(turn, score)
        _bound(self.judged)

    def user(self, turn: str, score: float) -> None:
        """Take note of what the user says of a turn: each grade counts once."""
        if turn in self.judged:
            self._compare(turn, score)
        else:
            self.spoken[turn] = score
            _bound(self.spoken)

    def _compare(self, turn: str, score: float) -> None:
        reward, self.judged[turn] = self.judged[turn], 0.0
        if reward and score:
            self.against = [*self.against, (reward > 0) != (score > 0)][-NEWEST:]

    @property
    def share(self) -> float | None:
        """Share of the grades with whose sign users agreed; None if no user gave feedback."""
        return 1.0 - sum(self.against) / len(self.against) if self.against else None


def _bound(alone: dict[str, float]) -> None:
    while len(alone) > _ALONE:
        del alone[next(iter(alone))]
