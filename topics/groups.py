"""Messages about groups: all trajectories of a prompt."""

from __future__ import annotations

from topics.prompts import ONLY_TASK
from topics.topic import BATCHES, Topic
from topics.wire import Count, Id, Message


class GroupDropped(Message):
    """An end: no member of this group is trained on; one credit returns to the prompter."""

    prompt_id: Id
    reason: Id  # deadline, failed, lag, or the name of the filter in asyncrl.algorithms.filters.FILTERS
    members: Count = 0  # members that had no end of their own before
    tokens: Count = 0  # sampled tokens thrown away with those members, as far as they are known
    task: Id = ONLY_TASK


GROUP_DROPPED = Topic(
    "group.dropped",
    GroupDropped,
    BATCHES,
    publishers=("buffer",),
    subscribers=("prompter", "rollout", "recorder", "supervisor"),
    key="prompt_id",
)
