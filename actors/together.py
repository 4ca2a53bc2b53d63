"""The progress of a worker's trajectories leaves together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class _Member(Protocol):
    def keep_with_others(self) -> None:
        """Publish what is worth a message of its own by now."""


class Together:
    """The trajectories under way on a worker.

    Messages that leave together share a write, a read and a wake-up at both ends. The first trajectory that must
    publish takes along all that will have to before long, and so their turns come to fall together.
    """

    def __init__(self) -> None:
        self._members: set[_Member] = set()

    @contextmanager
    def member(self, member: _Member) -> Iterator[None]:
        """Count it in while the context lasts."""
        self._members.add(member)
        try:
            yield
        finally:
            self._members.discard(member)

    def keep(self) -> None:
        """Let everybody publish."""
        for member in list(self._members):
            member.keep_with_others()
