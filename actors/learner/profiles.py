"""Traces of steps that an operator asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.learner.fold import LearnerFold
from actors.runtime.actor import Context
from asyncrl.bus.publish import publish
from topics.profiles import ProfileStored

T = TypeVar("T")


class StepProfiles:
    """Names the trace of each step that is wanted, and publishes that it is stored."""

    def __init__(self, context: Context, fold: LearnerFold) -> None:
        self._context, self._fold = context, fold
        self._stored = 0  # published, and maybe not read back

    async def around(self, step: int, make: Callable[[str], Awaitable[T]]) -> T:
        """Make a step; returns its result.

        Args:
            make: gets the path of the trace, without the number of the rank; "": none is wanted.
        """
        state = self._fold.state
        self._stored = max(self._stored, state.profiles_stored)
        if state.profiles_asked <= self._stored:
            return await make("")
        name = f"{self._context.actor_id}-step{step:06d}"
        result = await make(str(self._context.files.profiles / name))
        self._stored += 1
        path = f"{self._context.files.profiles.name}/{name}-rank0.json"
        await publish(self._context.bus, ProfileStored(self._context.actor_id, "steps", path))
        return result
