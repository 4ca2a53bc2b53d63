"""Tournaments: scores of the members of a group from a judge that compares two at a time.

A judge answers the scores of the two members that it compares; the greater wins. Scores lie in [0, 1], 1 for the best
member, and members that cannot be told apart share the mean of their places: those of equal standing, and those that
met and tied.
Source: ArenaRL (qqr), its five topologies; Swiss pairing and Buchholz scores as in the handbook of FIDE.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from itertools import combinations
from math import ceil, fsum, log2
from typing import Any, TypeAlias

Judge: TypeAlias = Callable[[int, int], Awaitable[tuple[float, float]]]
"""Compares two members by their numbers in the group: their scores, in that order."""

Tournament: TypeAlias = Callable[[int, Judge, random.Random], Awaitable[list[float]]]
"""Scores of a group of this size."""


class Matches:
    """The matches that were played: each pair is judged once in either order, so that no place has an advantage."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.scores: dict[tuple[int, int], tuple[float, float]] = {}  # by pair, the smaller number first

    async def play(self, left: int, right: int) -> tuple[float, float]:
        """Scores of two members, each the sum over both orders; a repeated meeting returns the same scores."""
        first, second = sorted((left, right))
        if (first, second) not in self.scores:
            there, back = await asyncio.gather(self._judge(first, second), self._judge(second, first))
            self.scores[first, second] = (there[0] + back[1], there[1] + back[0])
        scores = self.scores[first, second]
        return scores if left == first else (scores[1], scores[0])

    async def play_all(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
        """Play matches of which none needs the result of another, side by side; their scores in that order."""
        return await asyncio.gather(*(self.play(left, right) for left, right in pairs))

    async def winners(self, pairs: Iterable[tuple[int, int]]) -> list[int]:
        """Of each pair the member with the greater score; of equal ones the first."""
        pairs = list(pairs)
        results = await self.play_all(pairs)
        return [left if a >= b else right for (left, right), (a, b) in zip(pairs, results, strict=True)]

    @property
    def beaten(self) -> set[int]:
        """Members that lost a match."""
        return {pair[int(a > b)] for pair, (a, b) in self.scores.items() if a != b}

    def tied(self, standings: Sequence[Any]) -> list[set[int]]:
        """Return of each member those that it cannot be told apart from: it met and tied with them, or with others who
        did. A tie is ignored if it would join two members of which one beat the other; among several ties the one
        between higher ranks counts.
        """
        groups = [{member} for member in range(len(standings))]
        decided = {pair for pair, (a, b) in self.scores.items() if a != b}
        ties = sorted(self.scores.keys() - decided)
        ties.sort(key=lambda pair: sorted((standings[member] for member in pair), reverse=True), reverse=True)
        for left, right in ties:
            together = groups[left] | groups[right]
            if not any(pair in decided for pair in combinations(sorted(together), 2)):
                for member in together:
                    groups[member] = together
        return groups

    def mean(self, member: int) -> float:
        """Mean score of a member over all its matches; 0 before the first."""
        own = [scores[pair.index(member)] for pair, scores in sorted(self.scores.items()) if member in pair]
        return sum(own) / len(own) if own else 0.0


async def anchor(size: int, judge: Judge, _draw: random.Random) -> list[float]:
    """Everyone meets member 0: size - 1 matches. The anchor's own score is the mean of those it got."""
    matches = Matches(judge)
    await matches.play_all((0, member) for member in range(1, size))
    return _shared([matches.mean(member) for member in range(size)], matches)


async def round_robin(size: int, judge: Judge, _draw: random.Random) -> list[float]:
    """Everyone meets everyone: size * (size - 1) / 2 matches. A win is a point, a tie half a point."""
    points = [0.0] * size
    matches = Matches(judge)
    pairs = list(combinations(range(size), 2))
    for (left, right), scores in zip(pairs, await matches.play_all(pairs), strict=True):
        _award(points, left, right, scores)
    return places(points)


async def swiss(size: int, judge: Judge, draw: random.Random) -> list[float]:
    """Rounds in which members of about equal points meet, no pair twice: log2(size), rounded up.

    One that is left over rests, and none does twice: a point in the pairing, in the end the mean of its matches. Equal
    points are told apart by the points of the opponents (Buchholz), of which a rest is one with half of all. If several
    never lost, they meet until all of them are tied, and rank above the others. Members that met and tied share the
    place of the best of them.
    """
    points, opponents = [0.0] * size, [list[int]() for _ in range(size)]
    rested: set[int] = set()
    matches = Matches(judge)
    rounds = min(size - 1, ceil(log2(size)) if size > 1 else 0)
    for _ in range(rounds):
        order = draw.sample(range(size), size)
        order.sort(key=lambda member: -points[member] - (member in rested))
        if size % 2:
            resting = next((member for member in reversed(order) if member not in rested), order[-1])
            order.remove(resting)
            rested.add(resting)
        pairs = _pairs(order, opponents)
        for (left, right), scores in zip(pairs, await matches.play_all(pairs), strict=True):
            opponents[left].append(right)
            opponents[right].append(left)
            _award(points, left, right, scores)
    total = [points[member] * rounds / max(len(opponents[member]), 1) for member in range(size)]
    met = [fsum(total[one] for one in opponents[member]) + (member in rested) * rounds / 2 for member in range(size)]
    best = await _play_off(size, matches)
    return _shared([(member in best, total[member], met[member]) for member in range(size)], matches)


async def single_elimination(size: int, judge: Judge, _draw: random.Random) -> list[float]:
    """A knock-out, seeded by a match of each against member 0: at most 2 * size - 2 matches.

    The best two seeds can only meet in the final. Who lost in a later round is above who lost before, and of one round
    the greater mean score over all matches. Members that met and tied share the place of the best of them.
    """
    matches = Matches(judge)
    await matches.play_all((0, member) for member in range(1, size))
    seeds = sorted(range(size), key=lambda member: (-matches.mean(member), member))
    bracket: list[int | None] = [seeds[seed] if seed < size else None for seed in _bracket(size)]
    last = dict.fromkeys(range(size), 0)
    while len(bracket) > 1:
        pairs = list(zip(bracket[::2], bracket[1::2], strict=True))
        played = [(left, right) for left, right in pairs if left is not None and right is not None]
        won = dict(zip(played, await matches.winners(played), strict=True))
        bracket = [won.get((left, right), right if left is None else left) for left, right in pairs]  # type: ignore[arg-type]
        for winner in bracket:
            if winner is not None:
                last[winner] += 1
    return _shared([(last[member], matches.mean(member)) for member in range(size)], matches)


async def double_elimination(size: int, judge: Judge, draw: random.Random) -> list[float]:
    """A knock-out in which two losses end it: at most 2 * size - 1 matches.

    Members without a loss are paired with each other, and so are those with one. The last of both meet in the final,
    and again if both then have one loss. Who was out later is above who was out before. Members that met and tied share
    the place of the best of them.
    """
    matches = Matches(judge)
    lost = dict.fromkeys(range(size), 0)
    out: dict[int, int] = {}
    rounds = 0
    while size - len(out) > 1:
        rounds += 1
        alive = draw.sample([member for member in range(size) if member not in out], size - len(out))
        upper, lower = ([member for member in alive if lost[member] == losses] for losses in (0, 1))
        if len(upper) == len(lower) == 1:
            upper, lower = [*upper, *lower], []
        for bracket in (upper, lower):
            pairs = list(zip(bracket[::2], bracket[1::2], strict=False))
            for (left, right), winner in zip(pairs, await matches.winners(pairs), strict=True):
                loser = left + right - winner
                lost[loser] += 1
                if lost[loser] == 2:
                    out[loser] = rounds
    return _shared([(out.get(member, rounds + 1), matches.mean(member)) for member in range(size)], matches)


TOURNAMENTS: dict[str, Tournament] = {
    "anchor": anchor,
    "round_robin": round_robin,
    "swiss": swiss,
    "single_elimination": single_elimination,
    "double_elimination": double_elimination,
}
"""Tournaments by name."""


def places(standings: Sequence[Hashable]) -> list[float]:
    """Scores in [0, 1] by place, 1 for the greatest standing; equal ones share the mean of their places.

    A group of one, and one whose members are all equal, has 0.5 throughout.
    """
    last = len(standings) - 1
    order = sorted(standings, reverse=True)  # type: ignore[type-var]
    shares = {standing: order.index(standing) + (order.count(standing) - 1) / 2 for standing in set(order)}
    return [1 - shares[standing] / last if last else 0.5 for standing in standings]


def _shared(standings: Sequence[Any], matches: Matches) -> list[float]:
    """Scores by standings; tied members share the best of their ranks."""
    return places([max(standings[one] for one in group) for group in matches.tied(standings)])


async def _play_off(size: int, matches: Matches) -> set[int]:
    """Let those who never lost meet until all that are left are tied, and return these; none where everyone lost."""
    while True:
        beaten = matches.beaten
        tied = matches.tied([member not in beaten for member in range(size)])
        best = [member for member in range(size) if member == min(tied[member]) and not tied[member] & beaten]
        if len(best) < 2:
            return tied[best[0]] if best else set()
        await matches.play_all(zip(best[::2], best[1::2], strict=False))


def _award(points: list[float], left: int, right: int, scores: tuple[float, float]) -> None:
    won = 0.5 if scores[0] == scores[1] else float(scores[0] > scores[1])
    points[left] += won
    points[right] += 1 - won


def _pairs(order: list[int], opponents: list[list[int]]) -> list[tuple[int, int]]:
    """Pair members in their order with the next opponent that they have not met, or with the next if they met all."""
    left, pairs = list(order), []
    while left:
        first = left.pop(0)
        second = next((member for member in left if member not in opponents[first]), left[0])
        left.remove(second)
        pairs.append((first, second))
    return pairs


def _bracket(size: int) -> list[int]:
    """Seeds in the order of a knock-out of the next power of two: the best two meet in the final at the earliest."""
    seeds = [0]
    while len(seeds) < size:
        seeds = [seed for one in seeds for seed in (one, 2 * len(seeds) - 1 - one)]
    return seeds
