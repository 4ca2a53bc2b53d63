"""Rows that the policy has mastered leave the order of the data, and come back later to be tested again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec
import xxhash

from asyncrl.epochs import row_at

_TRIES = 32  # places that may take the turn of a mastered row


class Mastered(msgspec.Struct):
    """The rows of a run by their numbers, as plain data."""

    passed: dict[int, int] = {}  # groups in a row that passed
    rates: dict[int, float] = {}  # mean reward of the newest group
    changes: dict[int, list[int]] = {}  # numbers of the prompts from which on a row is out, in, out, ...


class MasteryRule(NamedTuple):
    """When rows leave the order, and for how long."""

    reward: float  # least mean reward of a group that passes
    groups: int  # in a row that pass, before the row leaves
    epochs: int  # after which it is tested again
    rows: int  # of an epoch
    seed: int

    def place(self, state: Mastered, number: int) -> int:
        """Return the place of the row of a prompt: another one of the epoch in the turn of a row that is out.

        It follows from the changes up to this prompt, so later ones do not move it.
        """
        if not self._is_out(state, number, number):
            return number
        first = number - number % self.rows
        for turn in range(_TRIES):
            drawn = xxhash.xxh3_64_intdigest(f"mastered:{self.seed}:{number}:{turn}".encode()) % self.rows
            if not self._is_out(state, first + drawn, number):
                return first + drawn
        return number

    def record(self, state: Mastered, number: int, rewards: Sequence[float], *, leaves_at: int) -> None:
        """Note the rewards of an ended prompt.

        Args:
            leaves_at: number of the first prompt that a change may move.
        """
        if not rewards:
            return
        row = row_at(self.place(state, number), self.rows, self.seed)
        rate = state.rates[row] = fmean(rewards)
        passed = state.passed[row] = state.passed.get(row, 0) + 1 if rate >= self.reward else 0
        changes = state.changes.get(row, [])
        if passed < self.groups or (changes and changes[-1] > number):
            return
        state.changes[row] = [*changes, leaves_at, leaves_at + self.epochs * self.rows]
        state.passed[row] = self.groups - 1  # one more group that passes is enough at the next test

    def out(self, state: Mastered, number: int) -> int:
        """Return how many rows are out at a prompt."""
        return sum(bisect_right(changes, number) % 2 for changes in state.changes.values())

    def _is_out(self, state: Mastered, place: int, number: int) -> bool:
        changes = state.changes.get(row_at(place, self.rows, self.seed), ())
        return bool(bisect_right(changes, number) % 2)
