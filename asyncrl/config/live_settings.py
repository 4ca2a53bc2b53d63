"""Settings of learning from live traffic: the table `[live]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.config.hindsight_settings import HindsightSettings
from asyncrl.config.judge_settings import JudgeSettings
from asyncrl.config.safety_settings import SafetySettings
from asyncrl.config.setting_types import Seconds, Settings


class LiveSettings(Settings):
    """Learning from live traffic: turns of the gateway, judged, beside the task."""

    # Share of the groups of RL that are graded turns, as long as some wait; 0: none, 1: nothing else.
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # `binary`: rewards; `distillation`: hints of judges, which a frozen copy of the policy is shown; `combine`: both.
    method: Literal["binary", "distillation", "combine"] = "binary"
    # Advantage of the reward of a turn: `none` takes it as it is, `less_others` less the mean of its batch's others.
    advantage: Literal["none", "less_others"] = "none"
    # Seconds after which a session has ended in which nothing was asked and nothing answered.
    idle_s: Seconds = 1800.0
    judge_s: Seconds = 600.0  # Seconds that a turn waits for its grade before it is given up, untrained.
    # Days for which what users said can be read; then its data keys are erased. 0: until `asyncrl purge`.
    retention_days: Annotated[int, Meta(ge=0, le=36500)] = 0
    hindsight: HindsightSettings = msgspec.field(default_factory=HindsightSettings)
    judge: JudgeSettings = msgspec.field(default_factory=JudgeSettings)
    safety: SafetySettings = msgspec.field(default_factory=SafetySettings)
