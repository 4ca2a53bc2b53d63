"""Messages about evaluations: all answers of one are a group, `samples` members for each held-out row."""

from __future__ import annotations

import msgspec

from topics.batches import BatchMember
from topics.prompts import GroupSize, Temperature
from topics.topic import BATCHES, TRAINING, Topic
from topics.wire import Count, Id, Message, Real, Seconds, Version


class EvalRequested(Message):
    """Held-out prompts shall be answered with this version; with a newer one as well, unless `eval.engines` is set."""

    eval_id: Id  # "e000003", the fourth one
    version: Version
    prompts: GroupSize
    temperature: Temperature
    dataset: str = ""  # name of the held-out set, where the run has several
    samples: GroupSize = 1  # answers of each prompt


class EvalScored(Message):
    """The result of an evaluation, and an end for every trajectory that it names; the others were dropped before."""

    eval_id: Id
    version: Version  # the requested number
    versions: dict[int, Count]  # tokens per version that really answered
    accuracy: Real  # mean reward of all answers
    prompts: Count
    failed: Count  # answers without a grade; they count as reward 0
    seconds: Seconds  # since the first prompt was issued
    members: list[BatchMember] = msgspec.field(default_factory=list)  # that were graded
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # means of what else the reward gave; `pass@k`
    dataset: str = ""
    samples: GroupSize = 1
    reason: str = ""  # why answers have no grade; "" where all have one


EVAL_REQUESTED = Topic(
    EvalRequested, TRAINING, ("learner",), ("prompter", "engine", "supervisor", "recorder"), id=("eval_id",)
)
EVAL_SCORED = Topic(EvalScored, BATCHES, ("buffer",), ("engine", "recorder", "supervisor"), id=("eval_id",))
