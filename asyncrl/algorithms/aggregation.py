"""From token losses to one number: what a token weighs.

Weights follow from the trainable token counts of the batch alone, before any stale or off-policy mask.
They are therefore the same whatever the packing, the micro-batches or the ranks, and a mask only takes
weight away: it never makes another token count more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

Aggregation: TypeAlias = Literal["trajectory", "token", "group", "constant"]


def token_weights(counts: Sequence[Sequence[int]], *, kind: Aggregation, constant_tokens: int = 1) -> list[list[float]]:
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
    if kind == "constant" and constant_tokens < 1:
        raise ValueError(f"constant_tokens is {constant_tokens}; it divides every token's loss, so it is at least 1")
    trajectories = sum(len(group) for group in counts)
    total = sum(sum(group) for group in counts)

    def divisor(group: Sequence[int], count: int) -> int:
        match kind:
            case "trajectory":
                return trajectories * count
            case "token":
                return total
            case "group":
                return len(counts) * sum(group)
            case "constant":
                return trajectories * constant_tokens

    return [[1.0 / divisor(group, count) if count else 0.0 for count in group] for group in counts]
