"""The claim about a trajectory whose data key is gone: its work cannot be read, so the claim is made of its names."""

from __future__ import annotations

from asyncrl.bus.log import Record
from asyncrl.bus.publish import attempt_of
from topics.ids import member_of, prompt_of
from topics.prompts import LIVE_TASK
from topics.trajectories import TrajectoryFailed


def purged_claim(record: Record, num_delivered: int, detail: str) -> TrajectoryFailed:
    """Return the claim that nothing will come of a turn of live traffic, which is a group of one.

    Args:
        record: about the trajectory.
        num_delivered: of it.
    """
    return TrajectoryFailed(
        trajectory_id=record.key,
        attempt=attempt_of(record) or 0,
        delivery=num_delivered,
        prompt_id=prompt_of(record.key),
        member=member_of(record.key),
        group_size=1,
        stage="rl",
        task=LIVE_TASK,
        reason="purged",
        detail=detail,
    )
