"""Settings of curricula: difficulties, and stages."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.config.algorithm_names import AdvantageName, AggregationName, FilterName, LossName
from asyncrl.config.role_settings import EstimatorName
from asyncrl.config.setting_types import Count, NonNegative, Positive, Rate, Settings, Share


class CurriculumSettings(Settings):
    """Difficulty that rises with accuracy, of a task whose rows are made by a rule (docs/curricula.md)."""

    option: str = ""  # Option of the source that is its difficulty, such as `letters` of `reverse`; empty: none rises.
    first: int = 1  # Value of the option at the lowest level.
    step: Positive = 1  # What one level adds to it.
    last: int = 1  # Greatest value.
    window: Positive = 4  # Levels that prompts are drawn from: the present one and those below it.
    # Share of the answers at the present level that pass, from which on the next level begins.
    accuracy: Share = 0.9
    groups: Positive = 8  # Groups of the present level whose answers are counted before it is decided.
    passing: float = 1.0  # Least reward of an answer that passes.


class StageReferenceSettings(Settings):
    """The penalty of the reference in a stage."""

    kl_coef: NonNegative | None = None  # As `learner.reference.kl_coef`.
    kl_estimator: EstimatorName | None = None  # As `learner.reference.kl_estimator`.


class StageTeacherSettings(Settings):
    """The teacher in a stage."""

    coef: NonNegative | None = None  # As `learner.teacher.coef`.


class StageCriticSettings(Settings):
    """The critic in a stage."""

    lr: Rate | None = None  # As `learner.critic.lr`.
    weight_decay: NonNegative | None = None  # As `learner.critic.weight_decay`.
    max_grad_norm: Rate | None = None  # As `learner.critic.max_grad_norm`.
    discount: Share | None = None  # As `learner.critic.discount`.
    gae_lambda: Share | None = None  # As `learner.critic.gae_lambda`.
    value_clip: NonNegative | None = None  # As `learner.critic.value_clip`.


class StageSettings(Settings):
    """A stage, to which `asyncrl stage RUN NAME` switches a run while it goes on (docs/curricula.md). What is left out
    is as the run and its tasks have it."""

    # Shares of tasks by their names, 0 for none of its prompts; a task left out keeps its `tasks.NAME.share`.
    shares: dict[str, Annotated[int, Meta(ge=0, le=1000)]] = msgspec.field(default_factory=dict)
    group_size: Positive | None = None  # Trajectories per prompt, of all tasks.
    temperature: NonNegative | None = None  # Sampling temperature, of all tasks.
    advantage: AdvantageName | None = None  # As `learner.advantage`, of all tasks.
    loss: LossName | None = None  # As `learner.loss`, with the options below.
    loss_options: dict[str, Any] | None = None  # As `learner.loss_options`; left out with another loss: none.
    aggregation: AggregationName | None = None  # As `learner.aggregation`.
    filters: list[FilterName] | None = None  # As `learner.filters`; their options are `learner.filter_options`.
    lr: Rate | None = None  # As `learner.lr`: the rate that the schedule and the warm-up of the run scale.
    weight_decay: NonNegative | None = None  # As `learner.weight_decay`.
    max_grad_norm: Rate | None = None  # As `learner.max_grad_norm`.
    turn_discount: Share | None = None  # As `learner.turn_discount`.
    reference: StageReferenceSettings = msgspec.field(default_factory=StageReferenceSettings)
    teacher: StageTeacherSettings = msgspec.field(default_factory=StageTeacherSettings)
    critic: StageCriticSettings = msgspec.field(default_factory=StageCriticSettings)
    at_step: Count = 0  # The stage begins by itself once this batch is packed, where it has not begun; 0: not so.
    # The stage begins by itself once the mean reward of the newest groups of the running stage is at least this.
    at_accuracy: float | None = None
    accuracy_groups: Positive = 16  # Groups, packed or dropped by a filter, whose answers that mean is over.
