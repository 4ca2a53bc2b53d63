"""Common parts of the losses of policy gradients: masks, a divergence from a reference, entropy, and figures."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.masks import MASKS, SECOND_MOMENT, MaskBounds, masked_by, second_moments
from asyncrl.algorithms.named import named, names
from asyncrl.algorithms.observations import OBSERVED
from asyncrl.algorithms.policy_sums import Treated, policy_sums
from asyncrl.algorithms.sequences import bounded_exp
from asyncrl.algorithms.token_loss import Loss, Tokens

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import OfBatch, Sums

    KlName: TypeAlias = str
    MaskName: TypeAlias = str
else:
    KlName = Literal[names(KL_ESTIMATORS)]
    MaskName = Literal[names(MASKS)]


_MASKS_WITH = {
    "sequence_floor": ("geometric", "product"),
    "sequence_cap": ("geometric", "product"),
    "second_moment_cap": ("m2po",),
    "opsm_cap": ("opsm",),
    "max_in_queue_lag": ("in_queue",),
    "max_in_flight_lag": ("in_flight",),
}  # masks that read each option


class Gain(NamedTuple):
    """The gain that a policy loss increases, for each token, [N]: weight * importance * value."""

    value: torch.Tensor
    importance: torch.Tensor  # without gradient
    clipped: torch.Tensor  # boolean, as in `Treated`
    off_policy: torch.Tensor  # boolean


class PolicyLoss(Loss, frozen=True):
    """A loss that increases the gain of each token, and has the options below."""

    # Masks of tokens that are too far from the sampler (docs/guides/algorithms.md describes each).
    masks: list[MaskName] = msgspec.field(default_factory=list)
    sequence_floor: Annotated[float, Meta(ge=0)] = 0.5  # Lower bound of `geometric` and `product`.
    sequence_cap: Annotated[float, Meta(gt=0)] = 2.0  # Upper bound of `geometric` and `product`.
    second_moment_cap: Annotated[float, Meta(ge=0)] = 0.04  # Largest mean of the squared log ratios with `m2po`.
    opsm_cap: Annotated[float, Meta(ge=0)] = 1e-4  # Nats of probability per token that `opsm` lets a row lose.
    max_in_queue_lag: Annotated[int, Meta(ge=0)] = 1  # Largest lag of a row's newest token with `in_queue`.
    max_in_flight_lag: Annotated[int, Meta(ge=0)] = 1  # Largest lag relative to the newest token, with `in_flight`.
    # Coefficient of the divergence from the reference model, which is added to the loss; 0 needs no reference.
    kl: Annotated[float, Meta(ge=0)] = 0.0
    # Its estimate from d = log p - log reference: d, d^2 / 2, or exp(-d) - 1 + d.
    kl_estimator: KlName = "k3"
    # Whether that is weighted by the ratio of trainer and sampler, which makes value and gradient unbiased.
    kl_unbiased: bool = False
    entropy: Annotated[float, Meta(ge=0)] = 0.0  # Coefficient of the entropy, which is subtracted from the loss.
    # Coefficient of the cross-entropy of observations (ECHO): tokens after the first sampled one of a row that the
    # policy did not sample, such as results of tools.
    observations: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        masked = ("proximal", SECOND_MOMENT) if SECOND_MOMENT in self.masks else ()
        observed = (OBSERVED,) if self.observations else ()
        return (*(("reference",) if self.kl else ()), *masked, *observed)

    @property
    def of_batch(self) -> dict[str, OfBatch]:
        named_tokens = partial(second_moments, cap=self.second_moment_cap)
        return {SECOND_MOMENT: named_tokens} if SECOND_MOMENT in self.masks else {}

    @property
    def uses_advantages(self) -> bool:
        # The masks of a batch count all tokens.
        return not self.kl and not self.entropy and not self.observations and not self.of_batch

    @property
    def uses_entropy(self) -> bool:
        return bool(self.entropy)

    @property
    def idle(self) -> tuple[str, ...]:
        found = [option for option, masks in _MASKS_WITH.items() if not set(masks) & set(self.masks)]
        return (*found, *(() if self.kl else ("kl_estimator", "kl_unbiased")))

    def gain(self, logprobs: torch.Tensor, tokens: Tokens) -> Gain:
        """Compute what this loss increases.

        Args:
            logprobs: [N] float32, see `Loss`.
            tokens: see `Loss`.
        """
        raise NotImplementedError

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        logprobs, weights = logprobs.float(), tokens.weights.float()
        log_ratio = logprobs.detach() - tokens.behaviour.float()
        found = self.gain(logprobs, tokens)
        masked = masked_by(self.masks, log_ratio, tokens, self._bounds())
        importance = found.importance.masked_fill(masked, 0.0) if self.masks else found.importance
        loss = -(weights * importance * found.value).sum()
        sums = policy_sums(log_ratio, tokens, Treated(found.clipped, found.off_policy, masked))
        if self.kl:
            nats, sums["reference_k3"] = self._divergence(logprobs, tokens)
            loss = loss + self.kl * (weights * nats).sum()
        if self.entropy:
            loss = loss - self.entropy * (weights * tokens.columns["entropy"]).sum()
        if self.observations:
            loss = loss - self.observations * (tokens.columns[OBSERVED] * logprobs).sum()
        return loss, sums

    def _bounds(self) -> MaskBounds:
        return MaskBounds(
            sequence=(self.sequence_floor, self.sequence_cap),
            opsm_cap=self.opsm_cap,
            max_in_queue_lag=self.max_in_queue_lag,
            max_in_flight_lag=self.max_in_flight_lag,
        )

    def _divergence(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats of each token from the reference, [N], and the sum of k3 over the trained ones.

        Source: unbiased as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
        """
        difference = logprobs - tokens.columns["reference"].float()
        nats = named(KL_ESTIMATORS, self.kl_estimator, "KL estimator")(difference)
        if self.kl_unbiased:
            nats = bounded_exp(logprobs - tokens.behaviour.float()) * nats
        return nats, (KL_ESTIMATORS["k3"](difference.detach()) * (tokens.weights > 0)).sum()
