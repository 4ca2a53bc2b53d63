"""Bounds on the importance weight of tokens that another policy, or another program, sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Tokens

    Correction: TypeAlias = Callable[
        [torch.Tensor, Tokens, tuple[float, float]], tuple[torch.Tensor, torch.Tensor]
    ]  # weight proximal/behaviour [N], tokens, (floor, cap) to the used weight [N] and its out-of-bounds flags [N]


def clamp(weight: torch.Tensor, tokens: Tokens, bounds: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", which numbers no
    equation: fengyao.notion.site/off-policy-rl.
    """
    return weight.clamp(*bounds), (weight < bounds[0]) | (weight > bounds[1])


def mask(weight: torch.Tensor, tokens: Tokens, bounds: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """No gradient where the weight is out of bounds; masked importance sampling.

    Source: M(k) of IcePop, arXiv 2510.18855, section 2.3.2, whose number of the equation was not verified.
    """
    outside = (weight < bounds[0]) | (weight > bounds[1])
    return weight.masked_fill(outside, 0.0), outside


def ignore(weight: torch.Tensor, tokens: Tokens, bounds: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight 1 for every token: no correction."""
    ones = weight.new_ones(weight.shape)
    return ones, ones < 1.0


CORRECTIONS: dict[str, Correction] = {"clamp": clamp, "mask": mask, "none": ignore}
"""Corrections by their name in `learner.loss_options.correction`."""
