"""Counts of turns for alarms and caps, kept by the keeper of sessions: figures of the newest ones, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_NEWEST = 128  # turns of each figure
_JUDGED = 1024  # grades of judges that a user may still speak against
_SAMES = 4096  # turns among which repeats are counted
_LEAST = 16  # of a figure that says something


class Watched(msgspec.Struct):
    """Figures of turns; lists have the newest entry last."""

    first_lengths: list[int] = []  # tokens of the first replies
    lengths: list[int] = []  # of the newest ones
    invalid_calls: list[bool] = []  # by reply
    questions: list[bool] = []
    against: list[bool] = []  # by grade of a judge about which a user spoke
    judged: dict[str, float] = {}  # grades of judges by tenant and turn
    sames: dict[str, int] = {}  # admitted turns with the same prompt and reply
    clipped: int = 0  # rewards

    def reply(self, tokens: int, marks: Sequence[str]) -> None:
        """Take note of a whole reply."""
        if len(self.first_lengths) < _NEWEST:
            self.first_lengths.append(tokens)
        _keep(self.lengths, tokens)
        _keep(self.invalid_calls, "invalid call" in marks)
        _keep(self.questions, "question" in marks)

    def judge(self, tenant: str, turn: str, reward: float) -> None:
        """Take note of a judge's grade."""
        self.judged.setdefault(f"{tenant} {turn}", reward)
        while len(self.judged) > _JUDGED:
            del self.judged[next(iter(self.judged))]

    def user(self, tenant: str, turn: str, score: float) -> None:
        """Take note of what the user says of a turn that a judge graded: each grade counts once."""
        reward = self.judged.pop(f"{tenant} {turn}", 0.0)
        if reward and score:
            _keep(self.against, (reward > 0) != (score > 0))

    def admit(self, same: str) -> None:
        """Take note of a turn that is to be trained."""
        if same:
            self.sames[same] = self.sames.pop(same, 0) + 1
            while len(self.sames) > _SAMES:
                del self.sames[next(iter(self.sames))]

    def figures(self) -> dict[str, float]:
        """Return vital signs by which the doctor raises alarms; those of which too few turns are known are left out."""
        shares = {"invalid_calls": self.invalid_calls, "questions": self.questions, "disagreement": self.against}
        found = {f"live_{name}": _mean(flags) for name, flags in shares.items() if len(flags) >= _LEAST}
        if len(self.first_lengths) == _NEWEST:
            found["live_length_drift"] = _mean(self.lengths) / max(_mean(self.first_lengths), 1.0)
        return found | {"rewards_clipped": float(self.clipped)}


def _keep(newest: list[int] | list[bool], value: int) -> None:
    newest.append(value)  # type: ignore[arg-type]  # a flag is a number
    del newest[:-_NEWEST]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
