"""The kinds of violation that an audit finds, by name."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "issued twice",
    "left out",
    "never issued",
    "wrong origin",
    "wrong row",
    "wrong seed",
    "wrong rules",
    "ended twice",
    "in two batches",
    "no end",
    "lost",
    "hidden loss",
    "left over",
    "overdue",
    "dropped without cause",
    "wrong queue",
    "generated twice",
    "not graded",
    "graded late",
    "second grade",
    "wrong reference",
    "damaged payload",
    "wrong tokens",
    "packed twice",
    "trained twice",
    "step out of order",
    "wrong batch",
    "wrong size",
    "unasked skip",
    "wrong stage",
    "wrong bound",
    "bound changed",
    "beyond lag bound",
    "more tokens than sampled",
    "fewer tokens than sampled",
    "wrong rewards",
    "unpublished version",
    "below min_version",
    "untrained version",
    "two digests",
    "foreign weights",
    "unasked promotion",
    "wrong checkpoint",
    "unknown lineage",
    "foreign writer",
    "unreadable record",
]


class Violation(NamedTuple):
    """Something a run's topics hold that must not be."""

    kind: Kind
    id: str  # of the trajectory, prompt, batch, version or message
    found: str
    expected: str


class Violations(list[Violation]):
    """All that was found."""

    def add(self, kind: Kind, id: object, found: str, expected: str) -> None:
        """Note one."""
        self.append(Violation(kind, str(id), found, expected))
