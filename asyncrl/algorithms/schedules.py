"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncrl.algorithms.named import named

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factor on the learning rate by the share of the steps done after the warm-up, by its name in `learner.schedule`."""


def learning_rate_factor(step: int, *, kind: str, warmup_steps: int = 0, total_steps: int = 0) -> float:
    """Factor on the learning rate in one step.

    Args:
        step: number of the optimiser step, from 1.
        kind: shape after the warm-up, a name in `SCHEDULES`.
        warmup_steps: steps of linear warm-up; step `warmup_steps` is the first at full rate. 0 for none.
        total_steps: the last step. A step later `linear` and `cosine` would be at 0, so that every step trains.

    Returns:
        A factor in [0, 1].
    """
    if step < 1:
        raise ValueError(f"step is {step}; optimiser steps count from 1")
    if step <= warmup_steps:
        return step / warmup_steps
    left = max(total_steps + 1 - warmup_steps, 1)
    return named(SCHEDULES, kind, "schedule")(min((step - warmup_steps) / left, 1.0))
