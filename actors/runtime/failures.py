"""The claim of a worker that nothing will come of a trajectory; what follows from it is the buffer's decision."""

from __future__ import annotations

from typing import Any

from actors.runtime.actor import Context
from actors.runtime.worker import Delivery, Produced
from topics.prompts import PromptIssued
from topics.trajectories import FailureReason, TrajectoryFailed, TrajectoryGenerated, member_fields


def failure(
    context: Context,
    work: PromptIssued | TrajectoryGenerated,
    delivery: Delivery[Any],
    reason: FailureReason,
    detail: str,
    tokens: int,
) -> Produced:
    """Return `trajectory.failed`; None if the lease has run out: while a process is frozen calls time out, and another
    worker may be about to finish.

    Args:
        tokens: sampled for it, all of which are lost.
    """
    name = work.trajectory_id
    context.log.warning("trajectory failed", trajectory=name, reason=reason, detail=detail, lapsed=delivery.lapsed)
    if delivery.lapsed:
        context.count("lapsed")
        return None
    message = TrajectoryFailed(
        **member_fields(work, delivery.at.deliveries), reason=reason, detail=detail, tokens=tokens
    )
    return [message]
