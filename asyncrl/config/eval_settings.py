"""Settings of evaluations.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.config.reward_settings import RewardScope, TournamentName
from asyncrl.config.setting_types import Count, NonNegative, Positive, Seconds, Settings, TaskName


class EvalSetSettings(Settings):
    """One of several held-out sets. What is left out is as in `[eval]`, `[task]` and `[reward]`."""

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
    # Seconds after its issue when an evaluation is scored with the grades it has: what is open counts as reward 0.
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
    # Name of the group `[engine.groups.NAME]` that serves evaluations alone: its engines stay at the version of the
    # oldest open evaluation until that is scored. Empty: the engines of training answer, with that version or a newer.
    engines: str = ""
    # Several held-out sets by name, each with evaluations of its own, in tables `[eval.sets.NAME]`.
    sets: dict[TaskName, EvalSetSettings] = msgspec.field(default_factory=dict)
