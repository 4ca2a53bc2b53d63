"""Members beyond the lag bound, and their ends. Pure."""

from __future__ import annotations

from actors.buffer.groups import drop, drop_group
from actors.buffer.state import LAG, Group, Plan
from asyncrl.algorithms.lag import fresh_share
from topics.trajectories import TrajectoryGraded
from topics.wire import Message


def drop_old(group: Group, old: list[TrajectoryGraded], step: int, *, again: bool) -> list[Message]:
    """Ends for members beyond the lag bound, to be issued `again` or not; then for the whole group when fewer than
    two (of more than one) are left."""
    if not again and len(group.live()) - len(old) < min(2, group.size):
        return [drop_group(group, LAG)]
    return [drop(group, member.member, LAG, lag=lagging(member, step), again=again) for member in old]


def too_old(plan: Plan, member: TrajectoryGraded, min_version: int) -> bool:
    """Return whether too few tokens of a member are within the lag bound."""
    least = 1.0 if plan.drop_stale else plan.min_fresh
    return fresh_share(member.versions, min_version=min_version) < least


def lagging(member: TrajectoryGraded, step: int) -> int:
    """The lag of its oldest token in the batch of a step."""
    return step - 1 - min(count.version for count in member.versions)
