"""Policy losses whose ratio has no gradient, or that mask by a divergence instead of clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta

from asyncrl.algorithms.clipped_losses import uncorrected
from asyncrl.algorithms.named import named, names
from asyncrl.algorithms.policy_loss import Gain, PolicyLoss
from asyncrl.algorithms.sequences import bounded_exp

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Sums, Tokens

    DivergenceName: TypeAlias = str
    Divergence: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # log p, log q [N] to [N]


class Cispo(PolicyLoss, frozen=True):
    """Policy gradient whose ratio of trainer and sampler is clipped and held fixed: no token loses its gradient.

    Source: CISPO of MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5.
    """

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 1.0  # Ratio clip below 1; at 1 there is none.
    clip_high: Annotated[float, Meta(ge=0)] = 4.0  # Ratio clip above 1.

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        ratio = bounded_exp(logprobs.detach() - tokens.behaviour.float())
        held = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return uncorrected(held * tokens.advantages.float() * logprobs, held != ratio)


class Reinforce(PolicyLoss, frozen=True):
    """REINFORCE, weighted by the truncated ratio of trainer and sampler, which is held fixed.

    Source: truncated weights of IMPALA, arXiv 1802.01561, sections 4.1 and 4.2, without its critic; as in the program
        of PipelineRL, arXiv 2509.19128, whose numbers of equations were not verified.
    """

    ratio_cap: Annotated[float, Meta(gt=0)] = 2.0  # Upper bound of the ratio.

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        ratio = bounded_exp(logprobs.detach() - tokens.behaviour.float())
        gain = uncorrected(tokens.advantages.float() * logprobs, ratio < 0.0)
        return gain._replace(importance=ratio.clamp(max=self.ratio_cap), off_policy=ratio > self.ratio_cap)


def total_variation(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """|p - q|: the total variation of token or not, a lower bound of that of the whole distribution."""
    return (logprobs.exp() - behaviour.exp()).abs()


def relative_entropy(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of token or not, in nats."""
    inside, outside = behaviour.exp(), _log_of_rest(behaviour)
    return inside * (behaviour - logprobs) + outside.exp() * (outside - _log_of_rest(logprobs))


def _log_of_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - p), where p is at most 1 - 1e-7: float32 knows no larger one below 1."""
    return (-logprobs.exp().clamp(max=1.0 - 1e-7)).log1p()


DIVERGENCES: dict[str, Divergence] = {"tv": total_variation, "kl": relative_entropy}
"""Divergences of the trainer from the sampler by their name in `learner.loss_options.divergence`."""

if not TYPE_CHECKING:
    DivergenceName = Literal[names(DIVERGENCES)]


class Dppo(PolicyLoss, frozen=True):
    """Policy gradient without those tokens that would lead further away from the sampler than a divergence allows.

    With ratio r of trainer and sampler the gain is r A, and 0 where the divergence is above its cap while r > 1 and
    A > 0, or r < 1 and A < 0.

    Source: DPPO, arXiv 2602.04879: the mask is eq. 12; its binary divergences, whose number was not verified. Two caps
        and the distance from the sampler as in prime-rl's default loss.
    """

    divergence: DivergenceName = "tv"  # `tv`: |p - q|; `kl`: relative entropy of token or not, in nats.
    divergence_cap: Annotated[float, Meta(gt=0)] = 0.2  # Largest divergence of a token that moves further away.
    # The same where A < 0; left out, it is `divergence_cap`.
    divergence_cap_negative: Annotated[float, Meta(gt=0)] | None = None
    # Coefficient of (log r)^2, the distance from the sampler, which is added to the loss of every token.
    sampler_kl: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def uses_advantages(self) -> bool:
        return super().uses_advantages and not self.sampler_kl

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        loss, sums = super().__call__(logprobs, tokens)
        if self.sampler_kl:
            distance = (logprobs.float() - tokens.behaviour.float()).square()
            loss = loss + self.sampler_kl * (tokens.weights.float() * distance).sum()
        return loss, sums

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        behaviour, advantages = tokens.behaviour.float(), tokens.advantages.float()
        log_ratio = logprobs - behaviour
        away = (log_ratio.detach() * advantages) > 0
        divergence = named(DIVERGENCES, self.divergence, "divergence")(logprobs.detach(), behaviour)
        cap = advantages.new_full(advantages.shape, self.divergence_cap)
        if self.divergence_cap_negative is not None:
            cap = cap.masked_fill(advantages < 0, self.divergence_cap_negative)
        clipped = away & (divergence > cap)
        return uncorrected((bounded_exp(log_ratio) * advantages).masked_fill(clipped, 0.0), clipped)
