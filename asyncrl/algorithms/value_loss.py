"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.sums import Sums
    from asyncrl.algorithms.token_loss import Tokens


def value_loss(values: torch.Tensor, tokens: Tokens, *, clip: float) -> tuple[torch.Tensor, Sums]:
    """Squared error of values, clipped around those before the update: 1/2 max((V - R)^2, (V' - R)^2), where V' is V
    clipped to [V_old - clip, V_old + clip].

    Args:
        values: [N] of the state before each token.
        tokens: [N] each, with the columns `values`, those before the update, and `returns`.
        clip: 0 for none.

    Returns:
        The weighted sum, and sums of the squared error, of clipped tokens and of what the explained variance needs.

    Source: PPO, arXiv 1707.06347, eq. 9 (squared error); clipping as in the PPO of OpenAI Baselines.
    """
    old, returns = tokens.columns["values"], tokens.columns["returns"]
    free = (values - returns).square()
    near = old + (values - old).clamp(-clip, clip) if clip else values
    clipped = (near - returns).square()
    loss = 0.5 * (tokens.weights * free.maximum(clipped)).sum()
    trained = (tokens.weights > 0).float()
    error = (returns - old) * trained
    sums = {
        "tokens": trained.sum(),
        "value_clip_fraction": ((clipped > free) * trained).sum(),
        "value_mean": (old * trained).sum(),
        "return_mean": (returns * trained).sum(),
        "_return_squared": (returns.square() * trained).sum(),
        "_error": error.sum(),
        "_error_squared": error.square().sum(),
    }
    return loss, {name: value.detach() for name, value in sums.items()}


def explained_variance(sums: dict[str, float]) -> float:
    """Share of the variance of the returns that the values before the update explain: 1 - var(R - V) / var(R).

    Args:
        sums: of `value_loss`, over the whole batch. Returns without variance are explained to 0.
    """
    count = sums["tokens"]
    spread = sums["_return_squared"] / count - (sums["return_mean"] / count) ** 2
    rest = sums["_error_squared"] / count - (sums["_error"] / count) ** 2
    return 1.0 - rest / spread if spread > 0 else 0.0
