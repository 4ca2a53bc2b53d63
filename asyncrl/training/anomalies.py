"""The rule by which the loss or the gradient of a step is an anomaly: far out of those of the steps before it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from asyncrl.config.settings import Config

_WINDOW = 32  # steps that are remembered
_LEAST = 8  # steps before which nothing is usual
# Advantages that cancel leave only rounding in the loss; a normal step is no anomaly relative to them.
_LEAST_DISTANCE = 0.05

Figures: TypeAlias = list[tuple[float, float]]
"""Loss and gradient norm of the newest steps of one stage."""


class Usual(msgspec.Struct, array_like=True, frozen=True):
    """The range of a step that is no anomaly; bounds may be infinite."""

    loss: tuple[float, float]
    grad_norm: float


def with_figures(figures: Mapping[str, Figures], stage: str, metrics: Mapping[str, float]) -> dict[str, Figures]:
    """Add a step to the newest ones, by stage; one without a gradient says nothing of others."""
    if not metrics.get("grad_norm"):
        return dict(figures)
    newest = [*figures.get(stage, []), (metrics.get("loss", 0.0), metrics["grad_norm"])]
    return {**figures, stage: newest[-_WINDOW:]}


class Recent:
    """The newest steps of a learner, and the usual range after them."""

    def __init__(self, times: float) -> None:
        self.figures: dict[str, Figures] = {}  # by stage
        # A gradient norm is an anomaly above this many medians; a loss, if it is this many times farther from the
        # median than the median distance, which counts as at least 0.05. 0: no anomalies.
        self._times = times

    def add(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Add a step."""
        self.figures = with_figures(self.figures, stage, metrics)

    def usual(self, stage: str) -> Usual | None:
        """Return the range of the next step; None with too few steps to judge."""
        figures = self.figures.get(stage, [])
        if not self._times or len(figures) < _LEAST:
            return None
        middle = statistics.median(loss for loss, _ in figures)
        distance = self._times * max(statistics.median(abs(loss - middle) for loss, _ in figures), _LEAST_DISTANCE)
        return Usual(
            (middle - distance, middle + distance), self._times * statistics.median(norm for _, norm in figures)
        )


def departure(usual: Usual, loss: float, grad_norm: float) -> str:
    """Name the values out of range; empty if there are none."""
    low, high = usual.loss
    found = (
        [f"gradient norm {grad_norm:.4g}, usual is up to {usual.grad_norm:.4g}"] if grad_norm > usual.grad_norm else []
    )
    found += [] if low <= loss <= high else [f"loss {loss:.4g}, usual is {low:.4g} to {high:.4g}"]
    return "; ".join(found)


_GAP = "mismatch_k3"
_KL = ("reference_kl", "reference_k3")  # from the reference: as a penalty, in the loss


def broken_assertions(config: Config, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Compare the figures of a step of RL with the bounds of the run.

    Args:
        step: of the batch.
        metrics: of the step; a figure that it has not (no token had a gradient, or the loss compares none) is not held.

    Returns:
        For each exceeded bound, the found and the expected value.
    """
    bounds, start = config.learner.assertions, config.start.step
    held = [("k3", _GAP)] if step > start else []
    held += [("first_k3", _GAP)] if step == start + 1 else []
    held += [("first_kl", name) for name in _KL] if step == 1 else []  # a fork may have an older reference
    return [
        f"{name} of step {step} is {metrics[name]:.6g} nats, learner.assertions.{key} = {getattr(bounds, key):g}"
        for key, name in held
        if getattr(bounds, key) and name in metrics and not abs(metrics[name]) <= getattr(bounds, key)
    ]
