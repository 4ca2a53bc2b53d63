"""The ends that the buffer gives members and groups."""

from __future__ import annotations

from actors.buffer.state import Group
from topics.groups import GroupDropped
from topics.trajectories import DropReason, TrajectoryDropped, TrajectoryFailed, TrajectoryGraded, tokens_sampled
from topics.wire import Message


def drop(
    group: Group, member: int, reason: DropReason, *, lag: int = 0, again: bool = False, detail: str = ""
) -> TrajectoryDropped:
    """The end of one member, of this attempt alone where it is to be issued `again`."""
    graded = group.graded.get(member)
    name = f"{group.prompt_id}-{member}"
    failed = group.failed.get(member)
    claim = graded or failed or group.submitted.get(member)
    return TrajectoryDropped(
        trajectory_id=name,
        attempt=claim.attempt if claim else group.attempts.get(member, 0),
        reason=reason,
        tokens=claim.tokens if isinstance(claim, TrajectoryFailed) else tokens_sampled(claim) if claim else 0,
        lag=lag,
        again=again,
        detail=detail,
        task=group.task_of(member),
    )


def drop_group(group: Group, reason: str) -> GroupDropped:
    """The end of all members that have none of their own."""
    failed = sum(claim.tokens for member, claim in group.failed.items() if member not in group.dropped)
    tokens = tokens_sampled(*group.live(), *group.ungraded()) + failed
    return GroupDropped(group.prompt_id, reason, group.size - len(group.dropped), tokens, task=group.task)


def drop_filtered(group: Group, reason: str) -> GroupDropped:
    """The end of a complete group that a filter names, with the rewards of its members."""
    dropped = drop_group(group, reason)
    dropped.rewards = [member.score for member in group.live()]
    return dropped


def drop_old(group: Group, old: list[TrajectoryGraded], step: int, *, again: bool) -> list[Message]:
    """Ends for members beyond the lag bound, to be issued `again` or not; then for the whole group when fewer than
    two (of more than one) are left."""
    if not again and len(group.live()) - len(old) < min(2, group.size):
        return [drop_group(group, "lag")]
    return [
        drop(group, member.member, "lag", lag=step - 1 - min(count.version for count in member.versions), again=again)
        for member in old
    ]
