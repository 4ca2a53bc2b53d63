"""Losses of policy gradients: clipped, and corrected for tokens that another policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.named import named, names
from asyncrl.algorithms.token_loss import Loss, Tokens

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Sums

    CorrectionName: TypeAlias = str
else:
    CorrectionName = Literal[names(CORRECTIONS)]

# exp(20) is about 5e8: far outside any clip range, and its square is finite in float32.
_MAX_LOG_RATIO = 20.0


class Bounds(NamedTuple):
    """Bounds of the ratio of a policy to the one that sampled."""

    clip: tuple[float, float] = (1.0, float("inf"))  # (low, high): ratio trained/proximal within [1 - low, 1 + high]
    correction: str = "clamp"  # of the weight proximal/sampler, a name in `CORRECTIONS`
    weight: tuple[float, float] = (0.0, float("inf"))  # (floor, cap) of that weight


class Decoupled(Loss, frozen=True):
    """Policy gradient with truncated importance sampling: each token's gradient is weighted by the ratio
    exp(trainer - sampler) of its probabilities, bounded. The decoupled clipped loss of AReaL at one update a batch."""

    # Policy at the start of the step: `current` takes it from the pass that trains, which is the same where a batch
    # makes one update; `recomputed` from a pass before it.
    proximal: Literal["current", "recomputed"] = "current"
    # A weight out of its bounds is clamped, or the token masked; `none` leaves all weights at 1.
    correction: CorrectionName = "clamp"
    # Upper bound of the weight exp(trainer - sampler), the difference of their log-probs.
    correction_cap: Annotated[float, Meta(gt=0)] = 2.0

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Loss`."""
        return ("proximal",) if self.proximal == "recomputed" else ()

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """See `Loss`."""
        proximal = tokens.columns.get("proximal", logprobs.detach())
        bounds = Bounds(correction=self.correction, weight=(0.0, self.correction_cap))
        return clipped_loss(logprobs, tokens, proximal, bounds)


class Ppo(Loss, frozen=True):
    """Clipped surrogate of PPO: the ratio of trainer and sampler is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2  # Ratio clip below 1.
    clip_high: Annotated[float, Meta(ge=0)] = 0.28  # Ratio clip above 1; above `clip_low` it is clip-higher.

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """See `Loss`."""
        bounds = Bounds(clip=(self.clip_low, self.clip_high), correction="none")
        return clipped_loss(logprobs, tokens, tokens.behaviour, bounds)


def clipped_loss(
    logprobs: torch.Tensor, tokens: Tokens, proximal: torch.Tensor, bounds: Bounds
) -> tuple[torch.Tensor, Sums]:
    """Clipped policy loss, decoupled from the policy that sampled.

    With ratio r = exp(logprob - proximal) and w = sg(exp(proximal - behaviour)) the loss of a token is
    -w min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        logprobs: [N] natural log of the trainer's probability of each token.
        tokens: [N] each.
        proximal: [N] log-probs of the policy that the clipped ratio is anchored at, without gradient.
        bounds: of the ratio, and of w.

    Returns:
        The summed loss, and sums of the ratio trainer/sampler, uncapped, of k3 = ratio - 1 - log ratio, which estimates
        KL(sampler || trainer) in nats, and of the tokens whose ratio was clipped or whose w was out of bounds.

    Source: PPO, arXiv 1707.06347, eq. 7; clip-higher DAPO, arXiv 2503.14476, eq. 10; decoupling arXiv 2110.00641,
        eq. 3, as in AReaL, arXiv 2505.24298, eq. 5; k3 Schulman, joschu.net/blog/kl-approx.html.
    """
    logprobs, behaviour, proximal = logprobs.float(), tokens.behaviour.float(), proximal.float()
    advantages, weights = tokens.advantages.float(), tokens.weights.float()
    ratio = _exp(logprobs - proximal)
    correct = named(CORRECTIONS, bounds.correction, "correction")
    importance, off_policy = correct(_exp(proximal - behaviour), tokens, bounds.weight)
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - bounds.clip[0], 1.0 + bounds.clip[1]) * advantages
    loss = -(weights * importance * free.minimum(clipped)).sum()
    trained = weights > 0
    sums = _policy_sums(logprobs.detach() - behaviour, trained)
    sums["clip_fraction"] = ((clipped < free) & trained).sum()
    sums["off_policy_fraction"] = (off_policy & trained).sum()
    return loss, sums


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    # An infinite ratio would turn the zero gradient of its clipped branch into NaN.
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _policy_sums(log_ratio: torch.Tensor, trained: torch.Tensor) -> Sums:
    ratio = _exp(log_ratio) * trained
    return {
        "tokens": trained.sum(),
        "ratio_mean": ratio.sum(),
        "_ratio_squared": ratio.square().sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.sum(),
        "mismatch_k3": ((ratio - 1.0 - log_ratio) * trained).sum(),
    }
