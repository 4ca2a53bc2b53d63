"""Messages about batches: the rows of one optimiser step."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.ids import Stage
from topics.prompts import NO_ESTIMATOR, ONLY_TASK, Attempt, Temperature
from topics.topic import BATCHES, TRAINING, Topic
from topics.trajectories import Reference
from topics.wire import Count, Id, Message, Real, Sequence, Step


class BatchMember(msgspec.Struct):
    """A trajectory of a batch, by reference."""

    trajectory_id: Id
    attempt: Attempt
    payload: Reference
    reward: Real
    tokens: Count  # trainable tokens


class BatchGroup(msgspec.Struct):
    """The graded members of one prompt, and the rules that it was issued with. The learner obeys them."""

    prompt_id: Id
    members: list[BatchMember]
    task: Id = ONLY_TASK
    temperature: Temperature = 1.0  # that its tokens were sampled at
    estimator: str = NO_ESTIMATOR  # of its advantages, a name in asyncrl.algorithms.advantages.ADVANTAGES


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """All that changes the mathematics of an optimiser step, besides its groups and their rules.

    Buffer and learner obey it, not the config.
    """

    loss: str = "decoupled"  # a name in asyncrl.algorithms.losses.LOSSES
    loss_options: dict[str, Any] = {}  # of that loss, all of them
    filters: list[str] = []  # names in asyncrl.algorithms.filters.FILTERS; the groups that they name are dropped
    aggregation: str = "token"  # a name in asyncrl.algorithms.aggregation.AGGREGATIONS
    constant_tokens: Count = 1  # divisor of the aggregation `constant`
    learning_rate: Real = 0.0  # of this step
    max_grad_norm: Real = 1.0
    betas: tuple[Real, Real] = (0.9, 0.95)  # AdamW
    weight_decay: Real = 0.0


class BatchPacked(Message):
    """An end for every trajectory it names: batch `step` is applied to version step - 1 and makes version `step`.

    Warm-up batches carry the steps 1 - warmup.steps .. 0, so that the last of them makes version 0.
    """

    step: Step
    stage: Stage
    groups: list[BatchGroup]
    min_version: Step  # step - 1 - max_lag: older tokens are masked by the learner
    objective: Objective = msgspec.field(default_factory=Objective)
    figures: dict[str, float] = msgspec.field(default_factory=dict)  # lengths, truncation, the reward's own metrics

    def headers(self) -> dict[str, str]:
        """Return the headers that routing needs."""
        return {"step": str(self.step), "stage": self.stage, "min-version": str(self.min_version)}


class BatchTrained(Message):
    """Batch `step` is in the weights, or was passed over: then version `step` has the weights of the one before."""

    step: Step
    lineage: Count
    stage: Stage
    metrics: dict[str, float]  # loss, norms, ratios, seconds
    lags: dict[int, Count]  # trained tokens per lag; -1 for supervised tokens
    masked: Count  # tokens masked because they were beyond max_lag
    rewards: list[Real]  # mean reward and its standard deviation
    trajectories: Count
    batch_sequence: Sequence  # of its batch.packed in the BATCHES stream
    skipped: bool = False  # passed over, as an operator asked: no token of it was trained on


BATCH_PACKED = Topic(
    "batch.packed",
    BatchPacked,
    BATCHES,
    publishers=("buffer",),
    subscribers=("learner", "prompter", "recorder", "supervisor"),
    id=("step",),
)
BATCH_TRAINED = Topic(
    "batch.trained",
    BatchTrained,
    TRAINING,
    publishers=("learner",),
    subscribers=("prompter", "buffer", "supervisor", "recorder"),
    id=("lineage", "step"),
)
