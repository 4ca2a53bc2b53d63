"""Messages about evaluations."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from topics.topic import EVALS, TRAINING, Topic
from topics.wire import Count, Id, Message, Real, Seconds, Version


class EvalRequested(Message):
    """Held-out prompts shall be answered by an engine that has at least this version."""

    eval_id: Id  # "v000000-held-out"
    version: Version
    prompts: Annotated[int, Meta(ge=1, le=1_000_000)]
    temperature: Annotated[float, Meta(ge=0.0, le=1000.0)]


class EvalScored(Message):
    """The result of an evaluation."""

    eval_id: Id
    version: Version  # the requested number
    versions: dict[int, Count]  # tokens per version that really answered
    accuracy: Real  # mean reward
    prompts: Count
    failed: Count  # prompts without a grade; they count as reward 0
    seconds: Seconds
    samples: list[dict[str, Any]] = msgspec.field(default_factory=list)  # a few: prompt, completion, label, reward


EVAL_REQUESTED = Topic(
    "eval.requested",
    EvalRequested,
    TRAINING,
    publishers=("learner",),
    subscribers=("evaluator", "supervisor", "recorder"),
    id=("eval_id",),
)
EVAL_SCORED = Topic(
    "eval.scored", EvalScored, EVALS, publishers=("evaluator",), subscribers=("recorder", "supervisor"), id=("eval_id",)
)

TOPICS: tuple[Topic[Any], ...] = (EVAL_REQUESTED, EVAL_SCORED)
