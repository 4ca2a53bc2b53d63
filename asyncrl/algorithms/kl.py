"""Estimates of the divergence of the trained policy from a reference, for each token.

Source: Schulman, joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.algorithms.sequences import bounded_exp

if TYPE_CHECKING:
    import torch

    KlEstimator: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # d = log p - log reference, [N], to nats [N]


def k1(difference: torch.Tensor) -> torch.Tensor:
    """The difference d: unbiased. As a loss, without the weighting, its expected gradient is 0."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased; as a loss its expected gradient is that of KL(trainer || reference)."""
    return difference.square() / 2.0


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased and never negative, with less variance than k1."""
    return bounded_exp(-difference) - 1.0 + difference


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators by their name in `learner.loss_options.kl_estimator`."""
