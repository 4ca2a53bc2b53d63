"""The settings that the buffer decides by."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from asyncrl.config.held_out import HeldOut, held_out_sets
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Begun, first_stages
from asyncrl.training.objective import objective_of
from topics.batches import Objective
from topics.ids import Stage


class Plan(NamedTuple):
    """The settings of packing."""

    batch_groups: dict[Stage, int]
    origin: int  # step of the weights before the first batch
    steps: int
    max_lag: int
    ahead: int
    min_fresh: float
    drop_stale: bool  # no stale token is trained on masked: its trajectory ends
    reissue: bool  # and is issued again
    deadline_s: dict[Stage, float]
    objective: Callable[[int, str], Objective]  # of a step in a stage, which is recorded with its batch
    held_out: dict[str, HeldOut]  # sets, by name
    stages: list[Begun]  # that the run was forked behind
    tenant_most: int = 2**31  # live turns of one tenant in a batch

    @classmethod
    def of(cls, config: Config) -> Plan:
        """Read them from the config."""
        learner = config.learner
        return cls(
            batch_groups={
                "warmup": config.warmup.batch_rows // config.warmup.rows_per_trajectory,
                "rl": config.buffer.batch_groups,
            },
            origin=config.origin,
            steps=learner.steps,
            max_lag=config.buffer.max_lag,
            ahead=config.ahead,
            min_fresh=config.buffer.min_fresh,
            drop_stale=config.buffer.stale != "mask",
            reissue=config.buffer.stale == "reissue",
            deadline_s={
                "warmup": config.buffer.group_deadline_s,
                "rl": config.buffer.group_deadline_s,
                "eval": config.eval.deadline_s,
            },
            objective=partial(objective_of, config),
            held_out=held_out_sets(config),
            stages=first_stages(config),
            tenant_most=math.ceil(config.live.safety.tenant_share * config.buffer.batch_groups),
        )
