"""Settings of the task, or of each of several.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.config.algorithm_names import AdvantageName
from asyncrl.config.curriculum_settings import CurriculumSettings
from asyncrl.config.reward_settings import RewardScope, TournamentName
from asyncrl.config.setting_types import NonNegative, Positive, Seconds, Settings


class TaskSettings(Settings):
    """The task: prompts and the rollout function."""

    # `reverse`, `sum`, `reasoning-gym:NAME`, a file (`rows.jsonl`, `rows.parquet`, `rows.jsonl@[0:100]`), or your own
    # `path/file.py:function` or `package.module:function`.
    source: str = "reverse"
    # Options of the source, such as `letters = 8` or `prompt_key = "question"`.
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    # Times each row of a file is issued as a prompt of RL, in a new order each time; 0: as often as is needed.
    epochs: Annotated[int, Meta(ge=0)] = 0
    # Seconds that making one row may take; a row that takes longer ends the run with an error.
    row_limit_s: Seconds = 300.0
    # Rollout function: `single_turn`, `path/to/file.py:function` or `package.module:function`.
    rollout: str = "single_turn"
    curriculum: CurriculumSettings = msgspec.field(default_factory=CurriculumSettings)


class MixedTaskSettings(Settings):
    """One of several tasks, whose prompts are issued in turn by their shares. What is left out is as for one task."""

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
