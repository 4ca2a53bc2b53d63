"""Messages about evaluations: their prompts are issued as a group whose members have a row each."""

from __future__ import annotations

import msgspec

from topics.batches import BatchMember
from topics.prompts import GroupSize, Temperature
from topics.topic import BATCHES, TRAINING, Topic
from topics.wire import Count, Id, Message, Real, Seconds, Version


class EvalRequested(Message):
    """Held-out prompts shall be answered by an engine that has at least this version."""

    eval_id: Id  # "e000003", the fourth one
    version: Version
    prompts: GroupSize
    temperature: Temperature


class EvalScored(Message):
    """The result of an evaluation, and an end for every trajectory that it names; the others were dropped before."""

    eval_id: Id
    version: Version  # the requested number
    versions: dict[int, Count]  # tokens per version that really answered
    accuracy: Real  # mean reward
    prompts: Count
    failed: Count  # prompts without a grade; they count as reward 0
    seconds: Seconds  # since the first prompt was issued
    members: list[BatchMember] = msgspec.field(default_factory=list)  # that were graded
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # means of what else the reward gave


EVAL_REQUESTED = Topic(
    "eval.requested",
    EvalRequested,
    TRAINING,
    publishers=("learner",),
    subscribers=("prompter", "supervisor", "recorder"),
    id=("eval_id",),
)
EVAL_SCORED = Topic(
    "eval.scored", EvalScored, BATCHES, publishers=("buffer",), subscribers=("recorder", "supervisor"), id=("eval_id",)
)
