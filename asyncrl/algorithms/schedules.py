"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine"]


def learning_rate_factor(step: int, *, kind: ScheduleKind, warmup_steps: int = 0, total_steps: int = 0) -> float:
    """Factor on the learning rate in one step.

    Args:
        step: number of the optimiser step, from 1.
        kind: shape after the warm-up. `constant` stays at 1; the others fall towards 0.
        warmup_steps: steps of linear warm-up; step `warmup_steps` is the first at full rate. 0 for none.
        total_steps: the last step of `linear` and `cosine`: a step later they would be at 0, so that every step trains.

    Returns:
        A factor in [0, 1].
    """
    if step < 1:
        raise ValueError(f"step is {step}; optimiser steps count from 1")
    if kind != "constant" and total_steps <= warmup_steps:
        raise ValueError(f"total_steps {total_steps} must exceed warmup_steps {warmup_steps} for a {kind} schedule")
    if step <= warmup_steps:
        return step / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min((step - warmup_steps) / (total_steps + 1 - warmup_steps), 1.0)
    return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
