"""From token losses to one number: what a token weighs.

Weights follow from the trainable token counts of the batch alone, before any stale or off-policy mask.
They therefore do not depend on packing, micro-batches or ranks, and a mask never raises the weight of another token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from asyncrl.algorithms.named import named


class Place(NamedTuple):
    """A trajectory among the others: trainable tokens of it, its group and the batch, and how many there are."""

    tokens: int
    group_tokens: int
    batch_tokens: int
    trajectories: int
    groups: int
    constant_tokens: int  # of the objective


Divisor: TypeAlias = Callable[[Place], int]

AGGREGATIONS: dict[str, Divisor] = {
    "trajectory": lambda place: place.trajectories * place.tokens,
    "token": lambda place: place.batch_tokens,
    "group": lambda place: place.groups * place.group_tokens,
    "constant": lambda place: place.trajectories * place.constant_tokens,
}
"""Divisors of the loss of a token, by their name in `learner.aggregation`."""


def token_weights(counts: Sequence[Sequence[int]], *, kind: str, constant_tokens: int = 1) -> list[list[float]]:
    """Weight of one token of every trajectory in the batch.

    Args:
        counts: per group, per trajectory: trainable tokens over all its segments.
        kind: `trajectory` gives every trajectory 1/N for its tokens to share, `group` every group 1/G,
            `token` every token of the batch the same, `constant` every token 1/(N * constant_tokens).
        constant_tokens: the divisor of `constant`, usually the largest completion length.

    Returns:
        Same shape as `counts`. All weights times their counts sum to 1, except with `constant`, and except
        for trajectories or groups without a trainable token, whose part is lost.

    Source: `trajectory` GRPO, arXiv 2402.03300, eq. 3; `token` DAPO, arXiv 2503.14476, eq. 8;
    `constant` Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    divisor = named(AGGREGATIONS, kind, "aggregation")
    if constant_tokens < 1:
        raise ValueError(f"constant_tokens is {constant_tokens}; it divides every token's loss, so it is at least 1")
    trajectories = sum(len(group) for group in counts)
    total = sum(sum(group) for group in counts)

    def weight(group: Sequence[int], count: int) -> float:
        place = Place(count, sum(group), total, trajectories, len(counts), constant_tokens)
        return 1.0 / divisor(place) if count else 0.0

    return [[weight(group, count) for count in group] for group in counts]
