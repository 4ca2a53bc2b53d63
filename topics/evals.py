"""What is said about evaluations."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.topic import EVALS, TRAINING, Topic
from topics.wire import Message


class EvalRequested(Message):
    """Held-out prompts shall be answered by an engine that has at least this version."""

    eval_id: str  # "v000000-held-out"
    version: int
    prompts: int
    temperature: float


class EvalScored(Message):
    """What an evaluation found."""

    eval_id: str
    version: int  # that was asked for
    versions: dict[int, int]  # tokens per version that really answered
    accuracy: float  # mean reward
    prompts: int
    failed: int  # prompts without a grade; they count as reward 0
    seconds: float
    samples: list[dict[str, Any]] = msgspec.field(default_factory=list)  # a few: prompt, completion, label, reward


EVAL_REQUESTED = Topic(
    "eval.requested", EvalRequested, TRAINING, said_by=("learner",), heard_by=("evaluator", "recorder")
)
EVAL_SCORED = Topic("eval.scored", EvalScored, EVALS, said_by=("evaluator",), heard_by=("recorder", "warden"))

TOPICS: tuple[Topic[Any], ...] = (EVAL_REQUESTED, EVAL_SCORED)
