"""Losses on tokens, and the sums their metrics are made of.

Every loss is a weighted sum over tokens with weights from `aggregation`, so losses and gradients of
micro-batches and ranks add up to those of the batch. Metrics are returned as sums for the same reason:
`merge_sums` adds them up and `metrics` turns them into means, once a step. All math is float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch

Sums: TypeAlias = dict[str, torch.Tensor]

# exp(20) is about 5e8: far outside any clip range, and its square is finite in float32.
_MAX_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """How to correct for tokens sampled by other weights, or by another program, than the trainer's."""

    proximal: Literal["current", "behaviour"] = "current"
    """Anchor of the clipped ratio: the trainer at the start of the step, or the sampler (bypass)."""
    mode: Literal["none", "clamp", "mask"] = "clamp"
    """Treatment of weights proximal/behaviour outside [floor, cap]; `none` leaves all weights at 1."""
    cap: float = 2.0
    floor: float = 0.0


class Tokens(NamedTuple):
    """The inputs of a policy loss for each token. All tensors have one shape."""

    behaviour: torch.Tensor  # natural log of the sampler's probability
    advantages: torch.Tensor
    weights: torch.Tensor  # from `aggregation`; 0 where the token is not trained on


def sft_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Weighted negative log-likelihood.

    Args:
        logprobs: [...] natural log of the trainer's probability of each token.
        weights: [...] from `aggregation`; 0 where the token is not trained on.

    Returns:
        The summed loss, and the sums for `metrics`.
    """
    logprobs = logprobs.float()
    trained = weights > 0
    sums = {"tokens": trained.sum(), "nll": -(logprobs.detach() * trained).sum()}
    return -(weights * logprobs).sum(), sums


def grpo_loss(
    logprobs: torch.Tensor,
    tokens: Tokens,
    *,
    clip: tuple[float, float],
    correction: Correction,
    proximal: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Clipped policy loss, decoupled from the policy that sampled.

    With ratio r = exp(logprob - proximal) and w = sg(exp(proximal - behaviour)) the loss of a token is
    -w min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        logprobs: [...] natural log of the trainer's probability of each token.
        tokens: behaviour log-probs, advantages and weights, each [...].
        clip: (low, high); high above low is clip-higher.
        correction: which proximal policy, and what bounds w.
        proximal: [...] log-probs of the trainer at the start of the step. Left out where the batch makes one
            update: then they are the current ones.

    Returns:
        The summed loss, and the sums for `metrics`.

    Source: PPO, arXiv 1707.06347, eq. 7; clip-higher DAPO, arXiv 2503.14476, eq. 10; decoupling
        arXiv 2110.00641, eq. 3, as in AReaL, arXiv 2505.24298, eq. 5; `clamp` is truncated importance
        sampling (Yao et al. 2025), `mask` IcePop, arXiv 2510.18855.
    """
    logprobs, behaviour = logprobs.float(), tokens.behaviour.float()
    advantages, weights = tokens.advantages.float(), tokens.weights.float()
    current = logprobs.detach()
    if correction.proximal == "behaviour":
        proximal = behaviour
    elif proximal is None:
        proximal = current
    ratio = _exp(logprobs - proximal.float())
    importance, off_policy = _importance(proximal.float() - behaviour, correction)
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) * advantages
    loss = -(weights * importance * torch.minimum(free, clipped)).sum()
    with torch.no_grad():
        sums = _policy_sums(current - behaviour, trained=weights > 0)
        sums["clipped"] = ((clipped < free) & (weights > 0)).sum()
        sums["off_policy"] = (off_policy & (weights > 0)).sum()
    return loss, sums


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    # An infinite ratio would turn the zero gradient of its clipped branch into NaN.
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _importance(log_weight: torch.Tensor, correction: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weight of each token, and where it was out of bounds."""
    weight = _exp(log_weight.detach())
    if correction.mode == "none":
        return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)
    outside = (weight < correction.floor) | (weight > correction.cap)
    if correction.mode == "mask":
        return weight.masked_fill(outside, 0.0), outside
    return weight.clamp(correction.floor, correction.cap), outside


def _policy_sums(log_ratio: torch.Tensor, *, trained: torch.Tensor) -> Sums:
    """Sums over trained tokens of the ratio trainer/sampler, uncapped, and of k3 = ratio - 1 - log ratio."""
    ratio = _exp(log_ratio) * trained
    k3 = (ratio - 1.0 - log_ratio) * trained
    return {
        "tokens": trained.sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.sum(),
        "k3": k3.sum(),
    }


def merge_sums(parts: list[Sums]) -> Sums:
    """Add the sums of micro-batches or ranks; `ratio_max` takes the largest."""
    merged: Sums = {}
    for name in parts[0] if parts else ():
        values = torch.stack([part[name].float() for part in parts])
        merged[name] = values.max() if name == "ratio_max" else values.sum()
    return merged


def metrics(sums: Sums) -> dict[str, float]:
    """Turn sums into the numbers of a step; empty where no token was trained on.

    Returns:
        `nll` and `entropy` in nats per token; `ratio_mean` and `ratio_max` of trainer/sampler; `mismatch_k3`
        in nats, estimating KL(sampler || trainer); `ess`, the effective sample share (sum r)^2 / (N sum r^2);
        `clip_fraction` and `off_policy_fraction` (weights capped or masked), each where it applies.

    Source: k3 Schulman, joschu.net/blog/kl-approx.html; ESS as in PipelineRL, arXiv 2509.19128.
    """
    value = {name: float(total) for name, total in sums.items()}
    tokens = value.get("tokens", 0.0)
    if not tokens:
        return {}
    means = {
        "nll": "nll",
        "entropy": "entropy",
        "ratio": "ratio_mean",
        "k3": "mismatch_k3",
        "clipped": "clip_fraction",
        "off_policy": "off_policy_fraction",
    }
    out = {shown: value[name] / tokens for name, shown in means.items() if name in value}
    if "ratio" in value:
        out["ratio_max"] = value["ratio_max"]
        out["ess"] = value["ratio"] ** 2 / (tokens * value["ratio_squared"])
    return out
