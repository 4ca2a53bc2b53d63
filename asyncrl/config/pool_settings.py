"""Settings of pools: rollout and reward workers that alone do the work on some tasks.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Count, Positive, Seconds, Settings

PoolName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?!eval\Z)[a-z][a-z0-9]{0,15}\Z",  # `rollout-eval` is the queue of evaluations
        description="a letter, then up to 15 of a to z and 0 to 9, and not eval",
    ),
]


class RewardPoolSettings(Settings):
    """Reward workers that alone grade some tasks. They inherit missing settings from `[reward]`. Rewards of
    `scope = "group"` are computed by other processes, which have no pools.
    """

    # Tasks and held-out sets that they grade; empty: those of the pool of this name in `[rollout.pools]`.
    tasks: list[str] = msgspec.field(default_factory=list)
    workers: Positive = 1  # Worker processes at start; `asyncrl scale reward.NAME=4` changes it.
    children: Positive | None = None  # As `reward.children`.
    time_limit_s: Seconds | None = None  # As `reward.time_limit_s`.
    memory_mb: Count | None = None  # As `reward.memory_mb`.
    in_flight: Positive | None = None  # As `reward.in_flight`.


class RolloutPoolSettings(Settings):
    """Rollout workers that alone run some tasks. They inherit missing settings from `[rollout]`. The workers that
    `rollout.workers` counts run all other tasks, the warm-up and live turns.
    """

    # Tasks (`[tasks.NAME]`) and held-out sets (`[eval.sets.NAME]`) that they run; each is in one pool at most.
    tasks: list[str] = msgspec.field(default_factory=list)
    workers: Positive = 1  # Worker processes at start; `asyncrl scale rollout.NAME=4` changes it.
    slots: Positive | Literal["auto"] | None = None  # As `rollout.slots`.
    tool_limit_s: Seconds | None = None  # As `rollout.tool_limit_s`.
    # Settings of `[sandbox]` that are other ones in this pool, such as `{ memory_mb = 8192, ready = 4 }`.
    sandbox: dict[str, Any] = msgspec.field(default_factory=dict)
