"""Policy losses that clip a ratio: to the start of the step, to the sampler, of tokens or of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta

from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.named import named, names
from asyncrl.algorithms.policy_loss import Gain, PolicyLoss
from asyncrl.algorithms.sequences import LEVELS, bounded_exp, geometric

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Tokens

    CorrectionName: TypeAlias = str
    LevelName: TypeAlias = str
else:
    CorrectionName = Literal[names(CORRECTIONS)]
    LevelName = Literal[names(LEVELS)]


class Clipped(PolicyLoss, frozen=True):
    """A clipped surrogate: with ratio r the gain of a token is min(r A, clip(r, 1 - low, 1 + high) A); with a dual clip
    at least dual_clip A where A < 0.

    Source: PPO, arXiv 1707.06347, eq. 7; clip-higher DAPO, arXiv 2503.14476, eq. 10; dual clip arXiv 1912.09729, eq. 5.
    """

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2  # Ratio clip below 1.
    clip_high: Annotated[float, Meta(ge=0)] = 0.28  # Ratio clip above 1; above `clip_low` it is clip-higher.
    # Ratio above which a token with a negative advantage has no gradient; left out, there is no such bound.
    dual_clip: Annotated[float, Meta(gt=1)] | None = None

    def clip(self, ratio: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Clipped value of each token and where the clip changed it, [N] each."""
        advantages = tokens.advantages.float()
        free = ratio * advantages
        value = free.minimum(ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages)
        if self.dual_clip is not None:
            value = value.maximum(self.dual_clip * advantages).where(advantages < 0, value)
        return value, value != free


class Decoupled(Clipped, frozen=True):
    """Policy gradient with truncated importance sampling: each token's gradient is weighted by the ratio
    exp(proximal - sampler) of its probabilities, bounded; the ratio of trainer and proximal policy is clipped.

    Source: decoupling arXiv 2110.00641, eq. 3, as in AReaL, arXiv 2505.24298, eq. 5.
    """

    # Policy that the clip starts at: `current` takes it from the pass that trains, which is the same as at the start of
    # the step where a batch makes one update; `recomputed` from a pass before it; `interpolated` from trainer and
    # sampler, one version before the trainer.
    proximal: Literal["current", "recomputed", "interpolated"] = "current"
    # A weight out of its bounds is clamped, or the token masked; `none` leaves all weights at 1.
    correction: CorrectionName = "clamp"
    # The weight of a token: its own ratio, or that of its row, the geometric mean or the product of its tokens'.
    correction_level: LevelName = "token"
    correction_floor: Annotated[float, Meta(ge=0)] = 0.0  # Lower bound of the weight.
    # Upper bound of the weight exp(proximal - sampler), the difference of their log-probs.
    correction_cap: Annotated[float, Meta(gt=0)] = 2.0

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "proximal") if self.proximal == "recomputed" else super().needs

    @property
    def idle(self) -> tuple[str, ...]:
        clips = ("clip_low", "clip_high", "dual_clip") if self.proximal == "current" else ()
        bounds = ("correction_level", "correction_floor", "correction_cap") if self.correction == "none" else ()
        return (*super().idle, *clips, *bounds)

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        proximal, behaviour = self._anchor(logprobs.detach(), tokens), tokens.behaviour.float()
        value, clipped = self.clip(bounded_exp(logprobs - proximal), tokens)
        ratio = named(LEVELS, self.correction_level, "level")(proximal - behaviour, tokens)
        correct = named(CORRECTIONS, self.correction, "correction")
        importance, off_policy = correct(ratio, tokens, (self.correction_floor, self.correction_cap))
        return Gain(value, importance, clipped, off_policy)

    def _anchor(self, current: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.proximal == "interpolated":
            return interpolated(current, tokens)
        return tokens.columns["proximal"].float() if self.proximal == "recomputed" else current


def interpolated(current: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Log-probs [N] of the policy one version before the trainer's: log-linear between sampler and trainer.

    A token of lag L >= 1 gets log q / L + (1 - 1 / L) log p; one of lag 0 gets log p.

    Args:
        current: [N] log p, without gradient.

    Source: A-3PO, arXiv 2512.06547; as the log-linear approximation of AReaL.
    """
    lags = tokens.in_queue + tokens.in_flight
    share = (lags > 0).to(current.dtype) / lags.clamp(min=1)  # of the sampler
    return current + share * (tokens.behaviour.float() - current)


class Ppo(Clipped, frozen=True):
    """Clipped surrogate of PPO: the ratio of trainer and sampler is clipped to [1 - clip_low, 1 + clip_high]."""

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        value, clipped = self.clip(bounded_exp(logprobs - tokens.behaviour.float()), tokens)
        return uncorrected(value, clipped)


class Gspo(Clipped, frozen=True):
    """Clipped surrogate of whole rows: all tokens of a row have the geometric mean of their ratios, each its own
    advantage (the token form of GSPO).

    Source: GSPO, arXiv 2507.18071, eqs. 13 and 14; its clip range, section 5.1.
    """

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 3e-4  # Ratio clip below 1, of a row.
    clip_high: Annotated[float, Meta(ge=0)] = 4e-4  # Ratio clip above 1, of a row.

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        current = logprobs.detach()
        of_row = geometric(current - tokens.behaviour.float(), tokens)
        return uncorrected(*self.clip(of_row * (logprobs - current).exp(), tokens))


def uncorrected(value: torch.Tensor, clipped: torch.Tensor) -> Gain:
    """Gain of tokens whose importance is 1."""
    ones = value.detach().new_ones(len(value))
    return Gain(value, ones, clipped, ones < 1.0)
