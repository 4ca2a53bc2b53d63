"""A run's logs so far, written as its actors would have: many trajectories issued, graded, packed and trained."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.talk import WRITER, say
from asyncrl.settings import Cast
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchGroup, BatchMember, BatchPacked, BatchTrained
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow, prompt_name
from topics.trajectories import TRAJECTORY_GRADED, Reference, TrajectoryGraded, VersionCount

_AT_ONCE = 512
_TOKENS = 100
_BY = {WRITER: "history"}


class History:
    """Says what the actors of a run without a warm-up would have said."""

    def __init__(self, bus: Bus, cast: Cast) -> None:
        self.bus = bus
        self._cast = cast
        self._batch_groups = cast.buffer.batch_groups
        self.steps = 0  # batches packed and trained so far
        self.graded = 0  # groups

    async def write(self, trajectories: int) -> None:
        """At least so many trajectories from their issue to the step that trained them, and the open groups."""
        self.steps = -(-trajectories // (self._batch_groups * self._cast.rollout.group_size))
        groups = self.steps * self._batch_groups
        still_open = (self._cast.buffer.max_lag + 1) * self._batch_groups
        await _all(
            self._issue(number, member)
            for number in range(groups + still_open)
            for member in range(self._cast.rollout.group_size)
        )
        await self.grade(groups)
        await _all(self._pack(step) for step in range(1, self.steps + 1))
        await _all(self._train(step) for step in range(1, self.steps + 1))

    async def grade(self, groups: int) -> None:
        """Grades of the next groups."""
        first, self.graded = self.graded, self.graded + groups
        size = self._cast.rollout.group_size
        await _all(self._grade(number, member) for number in range(first, first + groups) for member in range(size))

    async def train(self) -> None:
        """The next step."""
        self.steps += 1
        await self._train(self.steps)

    def _step_of(self, number: int) -> int:
        return number // self._batch_groups + 1

    async def _issue(self, number: int, member: int) -> None:
        message = PromptIssued(
            prompt_id=prompt_name("rl", number),
            member=member,
            group_size=self._cast.rollout.group_size,
            rows=[PromptRow("^abcdefgh=", "hgfedcba")],
            min_version=max(0, self._step_of(number) - 1 - self._cast.buffer.max_lag),
            seed=number << 8 | member,
        )
        await say(self.bus, PROMPT_ISSUED, message, key=message.trajectory_id, headers=_BY)

    async def _grade(self, number: int, member: int) -> None:
        prompt_id = prompt_name("rl", number)
        message = TrajectoryGraded(
            trajectory_id=f"{prompt_id}-{member}",
            prompt_id=prompt_id,
            member=member,
            group_size=self._cast.rollout.group_size,
            stage="rl",
            payload=_reference(number, member),
            versions=[VersionCount(self._step_of(number) - 1, _TOKENS)],
            reward=float(member % 2),
        )
        await say(self.bus, TRAJECTORY_GRADED, message, key=message.trajectory_id)

    async def _pack(self, step: int) -> None:
        first = (step - 1) * self._batch_groups
        names = [(number, prompt_name("rl", number)) for number in range(first, first + self._batch_groups)]
        groups = [
            BatchGroup(
                name,
                [
                    BatchMember(f"{name}-{member}", 0, _reference(number, member), float(member % 2), _TOKENS)
                    for member in range(self._cast.rollout.group_size)
                ],
            )
            for number, name in names
        ]
        message = BatchPacked(step, "rl", groups, step - 1 - self._cast.buffer.max_lag)
        await say(self.bus, BATCH_PACKED, message, headers=_BY)

    async def _train(self, step: int) -> None:
        message = BatchTrained(
            step=step,
            line=0,
            stage="rl",
            metrics={"loss": 0.0},
            lags={1: self._batch_groups * self._cast.rollout.group_size * _TOKENS},
            masked=0,
            rewards=[0.5, 0.5],
            trajectories=self._batch_groups * self._cast.rollout.group_size,
            batch_sequence=step,
        )
        await say(self.bus, BATCH_TRAINED, message, headers=_BY)


def _reference(number: int, member: int) -> Reference:
    return Reference((number << 8 | member) + 1, "0123456789abcdef", 4096)


async def _all(saying: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Say everything in order, many under way at once."""
    rest = iter(saying)
    while part := list(islice(rest, _AT_ONCE)):
        await asyncio.gather(*part)
