"""Counts of turns for alarms and caps, kept by the keeper of sessions: figures of the newest ones, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.live.agreement import NEWEST, Agreement

_SAMES = 4096  # turns among which repeats are counted
_LEAST = 16  # of a figure that says something


class Watched(msgspec.Struct):
    """Figures of turns; lists have the newest entry last."""

    first_lengths: list[int] = []  # tokens of the first replies
    lengths: list[int] = []  # of the newest ones
    invalid_calls: list[bool] = []  # by reply
    questions: list[bool] = []
    agreement: Agreement = msgspec.field(default_factory=Agreement)
    sames: dict[str, int] = {}  # admitted turns with the same prompt and reply
    clipped: int = 0  # rewards

    def reply(self, tokens: int, marks: Sequence[str]) -> None:
        """Take note of a whole reply."""
        if len(self.first_lengths) < NEWEST:
            self.first_lengths.append(tokens)
        _keep(self.lengths, tokens)
        _keep(self.invalid_calls, "invalid call" in marks)
        _keep(self.questions, "question" in marks)

    def admit(self, same: str) -> None:
        """Take note of a turn that is to be trained."""
        if same:
            self.sames[same] = self.sames.pop(same, 0) + 1
            while len(self.sames) > _SAMES:
                del self.sames[next(iter(self.sames))]

    def figures(self) -> dict[str, float]:
        """Return vital signs by which the doctor raises alarms; those of which too few turns are known are left out."""
        shares = {
            "invalid_calls": self.invalid_calls,
            "questions": self.questions,
            "disagreement": self.agreement.against,
        }
        found = {f"live_{name}": _mean(flags) for name, flags in shares.items() if len(flags) >= _LEAST}
        if len(self.first_lengths) == NEWEST:
            found["live_length_drift"] = _mean(self.lengths) / max(_mean(self.first_lengths), 1.0)
        return found | {"rewards_clipped": float(self.clipped)}


def _keep(newest: list[int] | list[bool], value: int) -> None:
    newest.append(value)  # type: ignore[arg-type]  # a flag is a number
    del newest[:-NEWEST]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
