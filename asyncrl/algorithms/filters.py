"""Filters: complete groups that teach nothing, which the buffer drops and the prompter replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from asyncrl.algorithms.named import named


class Rewarded(Protocol):
    """A member of a group, as its grade and its batch hold it: the batch is enough to repeat the decision."""

    reward: float


Filter: TypeAlias = Callable[[Sequence[Rewarded]], bool]


def zero_variance(members: Sequence[Rewarded]) -> bool:
    """Return whether all rewards are equal: no member has an advantage."""
    return len({member.reward for member in members}) == 1


FILTERS: dict[str, Filter] = {"zero_variance": zero_variance}
"""Predicates that drop a group, by the name in `learner.filters`."""


def filtered_by(members: Sequence[Rewarded], filters: Iterable[str]) -> str:
    """Name of the first of some filters that drops a group; empty where none does.

    Raises:
        AlgorithmError: there is no such filter.
    """
    return next((name for name in filters if named(FILTERS, name, "filter")(members)), "")
