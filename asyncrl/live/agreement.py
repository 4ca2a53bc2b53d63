"""How often users agree with judges about the same turns, of the newest ones; plain data that folds keep."""

from __future__ import annotations

import msgspec

NEWEST = 128  # grades about which a user spoke
_JUDGED = 1024  # grades that a user may still speak about


class Agreement(msgspec.Struct):
    """Grades of judges, and whether users agreed; lists have the newest entry last."""

    against: list[bool] = []  # by grade about which a user spoke: whether of the other sign
    judged: dict[str, float] = {}  # grades by tenant and turn

    def judge(self, turn: str, reward: float) -> None:
        """Take note of a judge's grade; the first of a turn counts."""
        self.judged.setdefault(turn, reward)
        while len(self.judged) > _JUDGED:
            del self.judged[next(iter(self.judged))]

    def user(self, turn: str, score: float) -> None:
        """Take note of what the user says of a turn that a judge graded: each grade counts once."""
        reward = self.judged.pop(turn, 0.0)
        if reward and score:
            self.against = [*self.against, (reward > 0) != (score > 0)][-NEWEST:]

    @property
    def share(self) -> float | None:
        """Share of the grades with whose sign users agreed; None where none spoke."""
        return 1.0 - sum(self.against) / len(self.against) if self.against else None
