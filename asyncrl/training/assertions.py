"""Assertions on the figures of a step: the gap between the log-probs of sampler and trainer."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.settings import Config

_GAP = "mismatch_k3"


def broken_assertions(config: Config, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Compare the figures of a step of RL with the bounds of the run.

    Args:
        step: of the batch.
        metrics: of the step; without `mismatch_k3` (no token had a gradient, or the loss compares none) nothing holds.

    Returns:
        For each bound that the step is beyond, what was found and what was expected.
    """
    bounds, gap = config.learner.assertions, metrics.get(_GAP)
    if gap is None or step <= config.start.step:
        return []
    first = step == config.start.step + 1
    found = {"k3": bounds.k3, "first_k3": bounds.first_k3 if first else 0.0}
    return [
        f"{_GAP} of step {step} is {gap:.6g} nats, learner.assertions.{key} = {bound:g}"
        for key, bound in found.items()
        if bound and not gap <= bound
    ]
