"""Events of a run that deserve a line."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

EventKind: TypeAlias = Literal["step", "news", "warning"]


class Event(NamedTuple):
    """Something worth a line."""

    kind: EventKind
    time_ns: int  # server's clock
    text: str


class Trouble:
    """Count of a fault's occurrences, and its newest text."""

    def __init__(self, what: str) -> None:
        self.what = what  # "trajectories failed"
        self.count = 0
        self.last = ""

    def add(self, last: str) -> bool:
        """Count one; True when the count deserves a line: the first, the tenth, the hundredth ..."""
        self.count += 1
        self.last = last
        return str(self.count).strip("0") == "1"

    def __str__(self) -> str:
        return f"{self.count:,} {self.what}; last: {self.last}"


def one_line(text: str, command: str) -> str:
    """The first and the last line of a text of several, and the command that shows all of it."""
    first, *rest = text.strip().splitlines()
    return f"{first} ... {rest[-1].strip()} (more: asyncrl {command})" if rest else text
