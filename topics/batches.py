"""Messages about batches: the rows of one optimiser step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from topics.ids import Stage
from topics.prompts import NO_ESTIMATOR, ONLY_TASK, Attempt, Member, Temperature
from topics.topic import BATCHES, TRAINING, Topic
from topics.trajectories import Metrics, Reference, TurnRewards
from topics.wire import Count, Headers, Id, Message, Real, Sequence, Step


class BatchMember(msgspec.Struct, omit_defaults=True):
    """A trajectory of a batch, by reference."""

    trajectory_id: Id
    attempt: Attempt
    payload: Reference
    reward: Real
    tokens: Count  # trainable tokens
    truncated: bool = False  # its last generation ended at the length limit
    metrics: Metrics = {}  # of its grade, those that filters and `Objective.reward_weights` read
    unshaped: Real | None = None  # as in its grade
    lengths: list[Count] = []  # as in its grade
    turn_rewards: TurnRewards = []  # as in its grade
    overruled: bool = False  # its reward is not that of its grade, but its user's; hints of its judge do not count

    @property
    def score(self) -> float:
        """The reward before it was shaped, by which a member passes: a right answer that is long is right."""
        return self.reward if self.unshaped is None else self.unshaped


class BatchGroup(msgspec.Struct):
    """The graded members of one prompt, and the rules that it was issued with. The learner obeys them."""

    prompt_id: Id
    members: list[BatchMember]
    task: Id = ONLY_TASK
    temperature: Temperature = 1.0  # that its tokens were sampled at
    estimator: str = NO_ESTIMATOR  # of its advantages, a name in asyncrl.algorithms.advantages.ADVANTAGES
    # Of late members (`rollout.late = "keep"`): those of the prompt in earlier batches, which advantages compare with.
    before: list[BatchMember] = []
    further: list[Member] = []  # members that continue, for a later batch

    @property
    def scores(self) -> list[float]:
        """Scores of all members of the prompt in this batch and in earlier ones."""
        return [member.score for member in (*self.before, *self.members)]


class Penalty(msgspec.Struct, frozen=True):
    """A penalty in the reward of each token: -coef * KL(policy || other model), estimated at that token."""

    column: str  # log-probs of the other model: reference, teacher
    coef: Real
    estimator: str = "k1"  # a name in asyncrl.algorithms.kl.KL_ESTIMATORS
    recomputed: bool = False  # the policy's log-probs are the trainer's before the update, not the sampler's


class Distillation(msgspec.Struct, frozen=True):
    """A divergence from the teacher, added to the loss of each token, over what the teacher finds most probable."""

    top_k: Annotated[int, Meta(ge=1)]  # and one outcome of all other tokens
    coef: Real = 1.0
    direction: str = "reverse"  # a name in asyncrl.algorithms.distillation.DIRECTIONS


class Hindsight(msgspec.Struct, frozen=True):
    """Rules of learning from hints: a teacher is shown them, the policy as it was before the first step."""

    w_rl: Real = 1.0  # of the advantage of the reward
    w_opd: Real = 1.0  # of the differences of log-probs, teacher less policy
    clip: Real = 1.0  # bound of a difference, nats
    top_k: Count = 0  # tokens of each place with a difference, in the loss; 0: the sampled one, in its advantage


class CriticStep(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an optimiser step that belongs to a critic."""

    discount: Real = 1.0  # of the reward of a token by those after it
    gae_lambda: Real = 0.95
    value_clip: Real = 0.2  # values are clipped around those before the update; 0: not
    learning_rate: Real = 0.0  # of this step
    max_grad_norm: Real = 1.0
    betas: tuple[Real, Real] = (0.9, 0.95)  # AdamW
    weight_decay: Real = 0.0
    alone: bool = False  # the policy does not change


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the mathematics of an optimiser step, except its groups and their rules.

    Buffer and learner obey it, not the config.
    """

    stage: Id | None = None  # table of `stages` that the batch follows: the newest one of its prompts
    loss: str = "decoupled"  # a name in asyncrl.algorithms.losses.LOSSES
    loss_options: dict[str, Any] = {}  # of that loss, all of them
    filters: list[str] = []  # names in asyncrl.algorithms.filters.FILTERS; the groups that they name are dropped
    filter_options: dict[str, dict[str, Any]] = {}  # of those filters, by name
    aggregation: str = "token"  # a name in asyncrl.algorithms.aggregation.AGGREGATIONS
    constant_tokens: Count = 1  # divisor of the aggregation `constant`
    columns: dict[str, str] = {}  # names in asyncrl.algorithms.own_columns.COLUMNS, by the column that they fill
    turn_discount: Real = 1.0  # of the reward of a turn by those before it, with the estimator `turns`
    reward_weights: dict[str, Real] = {}  # of metrics that are rewards of their own, with the estimator `gdpo`
    whiten: bool = False  # advantages are centered and scaled over the trained tokens of the batch
    learning_rate: Real = 0.0  # of this step
    max_grad_norm: Real = 1.0
    betas: tuple[Real, Real] = (0.9, 0.95)  # AdamW
    weight_decay: Real = 0.0
    reference: Step = 0  # a reference model whose weights are older than this version is renewed before the step
    penalties: list[Penalty] = []
    distillation: Distillation | None = None
    hindsight: Hindsight | None = None
    live_kl: bool = False  # how far live turns are from the reference is measured
    critic: CriticStep | None = None  # where an advantage needs values

    @property
    def moves_policy(self) -> bool:
        """True where the policy is trained, not the critic alone."""
        return self.critic is None or not self.critic.alone


class BatchPackedHeaders(Headers):
    """Headers of a batch that are shown while its run is watched."""

    step: Step
    stage: Stage
    min_version: Step


class BatchPacked(Message):
    """An end for every trajectory it names: batch `step` is applied to version step - 1 and makes version `step`.

    Warm-up batches carry the steps 1 - warmup.steps .. 0, so that the last of them makes version 0.
    """

    HEADERS: ClassVar[type[Headers]] = BatchPackedHeaders

    step: Step
    stage: Stage
    groups: list[BatchGroup]
    min_version: Step  # step - 1 - max_lag: older tokens are masked by the learner
    objective: Objective = msgspec.field(default_factory=Objective)
    figures: dict[str, float] = msgspec.field(default_factory=dict)  # lengths, truncation, the reward's own metrics

    @property
    def new_groups(self) -> list[BatchGroup]:
        """Its groups without late members of earlier ones: as many as `buffer.batch_groups`."""
        return [group for group in self.groups if not group.before]


class Carrier(msgspec.Struct):
    """A trajectory that carries an anomaly: a row of it, trained alone."""

    trajectory_id: Id
    loss: float  # its part of the batch's
    grad_norm: float  # of its part of the gradient


class Anomaly(msgspec.Struct):
    """A step whose loss or gradient is far out of those before it."""

    found: str  # the figures and their usual range
    carriers: list[Carrier]  # largest gradient first


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
    anomaly: Anomaly | None = None


BATCH_PACKED = Topic(
    BatchPacked, BATCHES, ("buffer",), ("learner", "prompter", "sessions", "recorder", "supervisor"), id=("step",)
)
BATCH_TRAINED = Topic(
    BatchTrained,
    TRAINING,
    ("learner",),
    ("prompter", "buffer", "sessions", "supervisor", "recorder"),
    id=("lineage", "step"),
)
