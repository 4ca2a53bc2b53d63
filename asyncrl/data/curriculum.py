"""Curricula: the difficulty of made rows rises with the accuracy on the hardest of them.

Source: RLVE's adaptive environments (arXiv 2511.07317). The difficulty h of a task begins at 0. Each prompt has a level
drawn evenly from the `window` levels up to h. Answers to prompts of level h are counted; once there are enough, h rises
by one where the share that passed is high enough, and the count begins again either way. h never falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from asyncrl.environments.protocol import DataError, DataSource
from topics.prompts import PromptRow

_PLACES = 1 << 40  # of one level; the level is in the higher bits of a row's place


def at_level(place: int, level: int) -> int:
    """The place of a row of some level in the endless order of its data."""
    return place + level * _PLACES


def level_of(place: int) -> int:
    """The level in the place of a row."""
    return place // _PLACES


class Climb(msgspec.Struct):
    """The difficulty of one task over the prompts of a run, as plain data."""

    rises: list[int] = []  # numbers of the prompts from which on the difficulty is one higher each
    passed: int = 0  # answers of the present difficulty that passed, since the last decision
    answers: int = 0


class Curriculum(NamedTuple):
    """The rule of a task."""

    window: int
    top: int  # greatest level
    answers: int  # at the present difficulty, before a decision
    accuracy: float
    passing: float  # least reward of an answer that passes
    seed: int

    def level(self, climb: Climb, number: int) -> int:
        """The level of a prompt by its number: a pure function of it, the seed and the rises before it."""
        highest = bisect_right(climb.rises, number)
        lowest = max(0, highest - self.window + 1)
        return lowest + xxhash.xxh3_64_intdigest(f"level:{self.seed}:{number}".encode()) % (highest - lowest + 1)

    def record(self, climb: Climb, number: int, rewards: Sequence[float], *, rises_at: int) -> None:
        """Count the answers to an ended prompt, and decide once there are enough.

        Args:
            rises_at: number of the first prompt that a rise may change.
        """
        if self.level(climb, number) != len(climb.rises):
            return
        climb.answers += len(rewards)
        climb.passed += sum(reward >= self.passing for reward in rewards)
        if climb.answers >= self.answers:
            if climb.passed >= self.accuracy * climb.answers and len(climb.rises) < self.top:
                climb.rises.append(rises_at)
            climb.answers = climb.passed = 0


class Ladder(msgspec.Struct):
    """The option of a source that is its difficulty, and its values by level."""

    option: str
    first: int
    step: int
    last: int

    @property
    def top(self) -> int:
        """The greatest level."""
        return max(0, (self.last - self.first) // self.step)

    def value(self, level: int) -> int:
        """The value of the option at a level."""
        return self.first + self.step * level


class LadderSource:
    """Made rows of several levels: a source for each. Rows carry `metadata["difficulty"]`, the value of the option."""

    rows_per_epoch: int | None = None

    def __init__(self, ladder: Ladder, open_with: Callable[[dict[str, int]], DataSource]) -> None:
        """
        Args:
            open_with: opens the data with further options.

        Raises:
            DataError: the data cannot serve at its first or last level.
        """
        self._ladder, self._open = ladder, open_with
        self._levels: dict[int, DataSource] = {}
        for level in (0, ladder.top):
            source = self._at(level)
            if source.rows_per_epoch is not None:
                raise DataError(f"{source.describe()}: a curriculum raises an option of made rows, not of a file")

    def row(self, index: int) -> PromptRow:
        """The row at place `index`, which holds its level."""
        level, place = divmod(index, _PLACES)
        row = self._at(level).row(place)
        return PromptRow(row.prompt, row.label, row.metadata | {"difficulty": self._ladder.value(level)})

    def longest(self, count: int) -> list[int]:
        """Places of the first rows of the last level, the hardest."""
        return [at_level(place, self._ladder.top) for place in range(count)]

    def describe(self) -> str:
        """The first level, and the range of its option."""
        ladder = self._ladder
        return f"{self._at(0).describe()}; {ladder.option} from {ladder.first} to {ladder.value(ladder.top)}"

    def _at(self, level: int) -> DataSource:
        if level not in self._levels:
            self._levels[level] = self._open({self._ladder.option: self._ladder.value(level)})
        return self._levels[level]
