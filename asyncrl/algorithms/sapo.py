"""A policy loss that fades out the gradient of a token instead of cutting it off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from asyncrl.algorithms.clipped_losses import uncorrected
from asyncrl.algorithms.policy_loss import Gain, PolicyLoss
from asyncrl.algorithms.sequences import bounded_exp

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Tokens


class Sapo(PolicyLoss, frozen=True):
    """Policy gradient with a soft gate: with ratio r of trainer and sampler the gain is 4 / t sigmoid(t (r - 1)) A.

    Source: SAPO, arXiv 2511.20347, whose numbers of equations were not verified; its temperatures are those of TRL.
    """

    temperature_positive: Annotated[float, Meta(gt=0)] = 1.0  # Steepness t of the gate where A > 0.
    temperature_negative: Annotated[float, Meta(gt=0)] = 1.05  # Steepness t of the gate elsewhere.

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        advantages = tokens.advantages.float()
        ratio = bounded_exp(logprobs - tokens.behaviour.float())
        steepness = advantages.new_full(advantages.shape, self.temperature_negative)
        steepness = steepness.masked_fill(advantages > 0, self.temperature_positive)
        gate = (steepness * (ratio - 1.0)).sigmoid() * 4.0 / steepness
        return uncorrected(gate * advantages, ratio.detach() < 0.0)
