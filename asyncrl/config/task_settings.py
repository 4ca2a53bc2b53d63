"""Settings of tasks, their rewards, curricula and stages, and of evaluations.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.algorithms.named import names
from asyncrl.algorithms.tournaments import TOURNAMENTS
from asyncrl.config.learner_settings import EstimatorName
from asyncrl.config.pool_settings import PoolName, RewardPoolSettings
from asyncrl.config.setting_types import (
    AdvantageName,
    AggregationName,
    Count,
    FilterName,
    LossName,
    NonNegative,
    Positive,
    Rate,
    Seconds,
    Settings,
    Share,
    TaskName,
)

RewardScope: TypeAlias = Literal["trajectory", "group"]
if TYPE_CHECKING:
    TournamentName: TypeAlias = str
else:
    TournamentName = Literal[("", *names(TOURNAMENTS))]


class OverlongSettings(Settings):
    """Punishment of long trajectories of RL, added to their rewards: 0 up to `longest_tokens - interval_tokens`, then
    falling in proportion to `-penalty` at `longest_tokens` (DAPO, eq. 13).
    """

    # Greatest punishment, of a trajectory as long as `longest_tokens` or longer; 0: none.
    penalty: NonNegative = 0.0
    longest_tokens: Count = 0  # Sampled tokens of a trajectory that are too many; 0 for `rollout.max_new_tokens`.
    interval_tokens: Positive = 4096  # Tokens before the longest within which the punishment grows.


class RewardSettings(Settings):
    """The reward: how a finished trajectory is graded."""

    # `exact`, `last_number`, `math`, `dapo`, `deepscaler`, `f1`, `gpqa`, `boxed_math`, `boxed_f1`, `boxed_gpqa`,
    # `ifbench`, `ifeval`, `reasoning-gym`, `random`, an `http://` address, a rubric file `path/file.toml`,
    # `path/file.py:function` or `package.module:function`; empty where the rollout function gives every reward
    # (`context.outcome`).
    function: str = "exact"
    # What one call grades: `trajectory`, or `group` where a score depends on the other answers to the same row. A
    # function of yours then gets lists over the members of the group, once all are generated or have failed.
    scope: RewardScope = "trajectory"
    # Tournament among the members of a group, with `scope = "group"`. `function` then compares two members and is
    # called as `judge(first, second, prompt, label)`, see docs/guides/write-a-reward.md. Empty: it grades the group.
    tournament: TournamentName = ""
    # Seconds that all comparisons of one group may take together, instead of `time_limit_s`.
    tournament_limit_s: Seconds = 300.0
    # Group `[engine.groups.NAME]` that judges for rubric files, with the first version of the run, and does nothing
    # else. Empty: the judge that the file names.
    judge_engines: str = ""
    judge_tokens: Positive = 1024  # Tokens of an answer of these engines.
    # Reward worker processes at start; as many more grade whole groups where a reward is of that scope.
    workers: Positive = 1
    children: Positive = 1  # Child processes a worker runs user functions in.
    # Completions that one call of a function of yours grades at most: above 1 it is given lists and returns a list.
    batch: Positive = 1
    # Seconds one call may take before its child process is killed and the trajectory fails.
    time_limit_s: Seconds = 30.0
    # Reward of a trajectory whose call takes longer than `time_limit_s`, for a function with `scope = "trajectory"`.
    # Without it the trajectory fails. The metric `reward_timeout` is then 1.
    timeout_reward: float | None = None
    # MB that each process of a user function may write to (data, not files or libraries it maps); beyond them the
    # trajectory fails. 0 for no limit.
    memory_mb: Count = 4096
    in_flight: Positive = 256  # Trajectories a reward worker holds at once.
    overlong: OverlongSettings = msgspec.field(default_factory=OverlongSettings)
    pools: dict[PoolName, RewardPoolSettings] = msgspec.field(default_factory=dict)


class CurriculumSettings(Settings):
    """Difficulty that rises with accuracy, of a task whose rows are made by a rule (docs/guides/curricula.md)."""

    option: str = ""  # Option of the source that is its difficulty, such as `letters` of `reverse`; empty: none rises.
    first: int = 1  # Value of the option at the lowest level.
    step: Positive = 1  # What one level adds to it.
    last: int = 1  # Greatest value.
    window: Positive = 4  # Levels that prompts are drawn from: the present one and those below it.
    # Share of the answers at the present level that pass, from which on the next level begins.
    accuracy: Share = 0.9
    groups: Positive = 8  # Groups of the present level whose answers are counted before it is decided.
    passing: float = 1.0  # Least reward of an answer that passes.


class MasteredSettings(Settings):
    """Rows that the policy has mastered leave the order of the data, and are tested again later. For a run of one task
    with a finite number of rows, without stages.
    """

    groups: Count = 0  # Groups in a row that pass, after which a row leaves; 0: no row leaves.
    reward: float = 1.0  # Least mean reward of a group that passes.
    epochs: Positive = 4  # Epochs after which such a row comes back; one group that passes lets it leave again.


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
    """A stage: `asyncrl stage RUN NAME` switches a live run to it (docs/guides/curricula.md).

    A stage inherits each setting that it leaves out from the run and its tasks.
    """

    # Shares of tasks by name, 0 for none of its prompts; other tasks keep their `tasks.NAME.share`.
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
    whiten: bool | None = None  # As `learner.whiten`.
    reference: StageReferenceSettings = msgspec.field(default_factory=StageReferenceSettings)
    teacher: StageTeacherSettings = msgspec.field(default_factory=StageTeacherSettings)
    critic: StageCriticSettings = msgspec.field(default_factory=StageCriticSettings)
    at_step: Count = 0  # The stage begins once this batch is packed, unless it has begun; 0: no condition.
    # The stage begins by itself once the mean reward of the newest groups of the running stage is at least this.
    at_accuracy: float | None = None
    accuracy_groups: Positive = 16  # Groups, packed or dropped by a filter, whose answers that mean is over.


class TaskSettings(Settings):
    """The task: prompts and the rollout function."""

    # `reverse`, `sum`, an environment (`reasoning-gym:NAME`, `text:file.py:Class`, `openenv:http://ADDRESS`), a file
    # (`rows.jsonl`, `rows.parquet`, `rows.jsonl@[0:100]`), or your own `path/file.py:function` or
    # `package.module:function`.
    source: str = "reverse"
    # Options of the source, such as `letters = 8` or `prompt_key = "question"`.
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    # Tokens that a prompt may have: rows of files with a longer one are left out, of training and of evaluation. 0: all
    # rows are kept. `asyncrl check` prints how many are left out.
    max_prompt_tokens: Count = 0
    # Times each row of a file is issued as a prompt of RL, in a new order each time; 0: as often as is needed.
    epochs: Annotated[int, Meta(ge=0)] = 0
    # Seconds that making one row may take, also each that your function lists; a longer one ends the run with an error.
    row_limit_s: Seconds = 300.0
    # Seconds that opening the data may take: to read a file, or for your function to list its rows.
    open_limit_s: Seconds = 600.0
    # Rollout function: `single_turn`, `environment` (that of the row), `harness:NAME`, `path/to/file.py:function` or
    # `package.module:function`.
    rollout: str = "single_turn"
    curriculum: CurriculumSettings = msgspec.field(default_factory=CurriculumSettings)
    mastered: MasteredSettings = msgspec.field(default_factory=MasteredSettings)


class MixedTaskSettings(Settings):
    """One of several tasks, whose prompts are issued in turn by their shares. It inherits missing settings from
    `[task]`, `[reward]` and `[rollout]`.
    """

    source: str | None = None  # As `task.source`.
    options: dict[str, Any] | None = None  # As `task.options`.
    share: Annotated[int, Meta(ge=1, le=1000)] = 1  # Prompts of it among as many as all shares add up to.
    rollout: str | None = None  # As `task.rollout`.
    reward: str | None = None  # As `reward.function`.
    reward_scope: RewardScope | None = None  # As `reward.scope`.
    tournament: TournamentName | None = None  # As `reward.tournament`.
    group_size: Positive | None = None  # As `rollout.group_size`.
    temperature: NonNegative | None = None  # As `rollout.temperature`.
    advantage: AdvantageName | None = None  # As `learner.advantage`.
    eval_source: str | None = None  # As `eval.source`; empty takes its `source` with another seed.
    curriculum: CurriculumSettings = msgspec.field(default_factory=CurriculumSettings)


class EvalSetSettings(Settings):
    """One of several held-out sets. It inherits missing settings from `[eval]`, `[task]` and `[reward]`."""

    prompts: Annotated[int, Meta(ge=1, le=65536)] | None = None  # As `eval.prompts`.
    source: str | None = None  # As `eval.source`.
    options: dict[str, Any] | None = None  # As `task.options`.
    rollout: str | None = None  # As `task.rollout`.
    reward: str | None = None  # As `reward.function`.
    reward_scope: RewardScope | None = None  # As `reward.scope`.
    tournament: TournamentName | None = None  # As `reward.tournament`.
    temperature: NonNegative | None = None  # As `eval.temperature`.
    max_new_tokens: Positive | None = None  # As `eval.max_new_tokens`.
    samples: Positive | None = None  # As `eval.samples`.
    pass_at: list[Positive] | None = None  # As `eval.pass_at`.
    pass_reward: float | None = None  # As `eval.pass_reward`.


class EvalSettings(Settings):
    """Evaluation on held-out prompts, by the task's rollout function and reward."""

    prompts: Annotated[int, Meta(ge=0, le=65536)] = 0  # Prompts of one evaluation; 0 for no evaluation.
    # Seconds after its issue when an evaluation is scored with its grades so far: open answers count as reward 0.
    deadline_s: Seconds = 600.0
    every: Count = 0  # RL steps between evaluations; 0 evaluates version 0 and the last one only.
    source: str = ""  # Held-out source as in `task.source`; empty takes the task's with another seed.
    temperature: NonNegative = 0.0  # Sampling temperature; 0 is greedy.
    max_new_tokens: Count = 0  # Greatest number of tokens of an answer; 0 takes `rollout.max_new_tokens`.
    samples: Positive = 1  # Answers of each prompt.
    # Numbers of answers k for which `pass@k` is estimated: the probability that one of k answers is correct. None is
    # above `samples`.
    pass_at: list[Positive] = msgspec.field(default_factory=list)
    pass_reward: float = 1.0  # Least reward of an answer that `pass@k` counts as correct.
    # Name of the group `[engine.groups.NAME]` that serves only evaluations: its engines stay at the version of the
    # oldest open evaluation until that is scored. Empty: the engines of training answer, with that version or a newer.
    engines: str = ""
    # Several held-out sets by name, each with its own evaluations, in tables `[eval.sets.NAME]`.
    sets: dict[TaskName, EvalSetSettings] = msgspec.field(default_factory=dict)
