"""Figures of the tokens of a policy loss: their distance from the sampler, and the corrections of it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.algorithms.sequences import bounded_exp

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.sums import Sums
    from asyncrl.algorithms.token_loss import Tokens

LAG_EDGES = (0, 1, 2, 4, 8)  # smallest lag of each bucket
LAG_NAMES = ("0", "1", "2_3", "4_7", "8_up")
RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)


class Treated(NamedTuple):
    """Tokens that a loss did not take as they were, [N] boolean each."""

    clipped: torch.Tensor  # their ratio is out of the clip range
    off_policy: torch.Tensor  # their weight was out of its bounds
    masked: torch.Tensor  # a mask named them


def policy_sums(log_ratio: torch.Tensor, tokens: Tokens, treated: Treated) -> Sums:
    """Sums over the trained tokens of a micro-batch, all together and by buckets of lag.

    Args:
        log_ratio: [N] of trainer and sampler, without gradient.

    Returns:
        Sums for `metrics`: of the ratio, uncapped, of k3 = ratio - 1 - log ratio, which estimates
        KL(sampler || trainer) in nats (Schulman, joschu.net/blog/kl-approx.html), of the tokens that were treated, and
        of the tokens whose ratio is in each of some bins. `NAME/in_queue_1` is over the tokens with that lag.
    """
    trained = tokens.weights > 0
    ratio = bounded_exp(log_ratio) * trained
    values = {
        "tokens": trained,
        "ratio_mean": ratio,
        "_ratio_squared": ratio.square(),
        "mismatch_k3": (ratio - 1.0 - log_ratio) * trained,
        "clip_fraction": treated.clipped & trained,
        "off_policy_fraction": treated.off_policy & trained,
        "masked_fraction": treated.masked & trained,
        **_ratio_bins(ratio, trained),
    }
    sums = {name: value.sum() for name, value in values.items()}
    sums["ratio_max"] = ratio.max() if ratio.numel() else ratio.sum()
    return sums | _by_lag(values, tokens)


def _ratio_bins(ratio: torch.Tensor, trained: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tokens of each bin of a histogram of the ratio, [N] boolean each."""
    names = [f"{low:g}_to_{high:g}" for low, high in pairwise(RATIO_EDGES)]
    names = [f"below_{RATIO_EDGES[0]:g}", *names, f"from_{RATIO_EDGES[-1]:g}"]
    reached = [trained, *((ratio >= edge) & trained for edge in RATIO_EDGES)]
    bins = [*(this > other for this, other in pairwise(reached)), reached[-1]]
    return {f"ratio_{name}": found for name, found in zip(names, bins, strict=True)}


def _by_lag(values: dict[str, torch.Tensor], tokens: Tokens) -> Sums:
    kinds = {"in_queue": tokens.in_queue, "in_flight": tokens.in_flight}
    keys = [f"{kind}_{bucket}" for kind in kinds for bucket in LAG_NAMES]
    count = len(tokens.in_queue)
    matrix = values["ratio_mean"].new_empty(len(values), count)  # [figures, N]
    for place, value in zip(matrix.unbind(), values.values(), strict=True):
        place.copy_(value)
    buckets = matrix.new_empty(count, len(kinds), len(LAG_EDGES))
    for number, lags in enumerate(kinds.values()):
        reached = lags[:, None] >= lags.new_tensor(LAG_EDGES)
        buckets[:, number, :-1] = reached[:, :-1] > reached[:, 1:]
        buckets[:, number, -1] = reached[:, -1]
    totals = zip(values, (matrix @ buckets.flatten(1)).unbind(), strict=True)
    return {f"{name}/{key}": one for name, row in totals for key, one in zip(keys, row.unbind(), strict=True)}
