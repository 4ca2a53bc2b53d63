"""The services that a worker gives a rollout context."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

from asyncrl.tools.server import Toolbox
from topics.actors import Waiting
from topics.trajectories import Answer
from topics.wire import Int32Array

Asked: TypeAlias = str | list[dict[str, Any]] | list[int]
"""What a second model is asked: text, chat messages, or token ids of its vocabulary."""


class Limits(NamedTuple):
    """Bounds of one generation."""

    max_new_tokens: int
    stop: list[str]
    seed: int = 0  # of the draws, at each position


class Host(Protocol):
    """The services that a worker gives a context: sampling, and storing progress."""

    async def sample(self, input_ids: Int32Array, answer: Answer, limits: Limits) -> None:
        """Extend an open answer until it is done, over updates and deaths of engines."""

    async def checkpoint(self) -> None:
        """Publish the current journal; returns when it is stored."""

    @property
    def toolbox(self) -> Toolbox:
        """The servers of tools of the worker."""

    async def opponent(self, asked: Asked, limits: Limits) -> tuple[list[int], str, str]:
        """Return the tokens of a second model, how its answer ended, and its text; see `RolloutContext.opponent`."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for one of the slots of the worker, and take it for a block."""

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        """Suspends the lease's progress timeout for a call with its own limit."""
