"""Messages about groups: all trajectories of a prompt."""

from __future__ import annotations

import msgspec

from topics.prompts import ONLY_TASK
from topics.topic import BATCHES, GRADES, Topic
from topics.trajectories import Metrics, TrajectorySubmitted
from topics.wire import Count, Id, Message, Real


class GroupDropped(Message):
    """An end: no member of this group is trained on; one credit returns to the prompter."""

    prompt_id: Id
    reason: Id  # deadline, failed, lag, purged, or the name of the filter in asyncrl.algorithms.filters.FILTERS
    members: Count = 0  # members that had no earlier end
    tokens: Count = 0  # discarded tokens of those members, if known
    task: Id = ONLY_TASK
    # Of its graded members, before they were shaped, where a filter dropped it.
    rewards: list[Real] = msgspec.field(default_factory=list)


class GroupCompleted(Message):
    """Every member of a group is complete: one call of its reward function grades the remaining members."""

    group_id: Id  # the prompt; of an evaluation with the first member that answers the same row: "e000003-8"
    members: list[TrajectorySubmitted]  # by member number


class MemberGrade(msgspec.Struct, omit_defaults=True):
    """The score of one member of a group."""

    reward: Real | None = None  # None: there is none
    metrics: Metrics = msgspec.field(default_factory=dict)
    fault: str = ""  # why there is none


class GroupGraded(Message):
    """The scores that one call of a reward function gave a group. The first one stored counts: no call follows it."""

    group_id: Id
    grades: list[MemberGrade]  # of the members of its `group.completed`, in their order


GROUP_COMPLETED = Topic(GroupCompleted, BATCHES, ("buffer",), ("groupreward",), key="group_id")
GROUP_GRADED = Topic(GroupGraded, GRADES, ("groupreward",), ("groupreward",), key="group_id", fenced=True)
GROUP_DROPPED = Topic(
    GroupDropped, BATCHES, ("buffer",), ("prompter", "sessions", "rollout", "recorder", "supervisor"), key="prompt_id"
)
