"""Filters: complete groups that teach nothing, which the buffer drops and the prompter replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topics.trajectories import TrajectoryGraded


def zero_variance(members: Sequence[TrajectoryGraded]) -> bool:
    """Return whether all rewards are equal: no member has an advantage."""
    return len({member.reward for member in members}) == 1


FILTERS: dict[str, Callable[[Sequence[TrajectoryGraded]], bool]] = {"zero_variance": zero_variance}
"""Predicates that drop a group, by the name in `buffer.filters`."""
