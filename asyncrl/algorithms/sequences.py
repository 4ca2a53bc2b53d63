"""Ratios of log-probs, of single tokens and of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Tokens

    Level: TypeAlias = Callable[[torch.Tensor, Tokens], torch.Tensor]  # log ratio [N], tokens to ratio [N]

# exp(20) is about 5e8: far outside any clip range, and its square is finite in float32.
_MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Exponential of a log ratio, which is first bounded to [-20, 20]."""
    # An infinite ratio would turn the zero gradient of its clipped branch into NaN.
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def row_sums(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Sum of a row's trained tokens, for each of its tokens.

    Args:
        values: [N] without gradient.

    Returns:
        [N] float64, so that the order of the additions does not show in float32.
    """
    counted = values.double().masked_fill(tokens.weights <= 0, 0.0)
    return counted.new_zeros(len(counted)).index_add(0, tokens.rows, counted)[tokens.rows]


def row_means(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Mean over a row's trained tokens, for each of its tokens: as `row_sums`; 0 without trained tokens."""
    return row_sums(values, tokens) / row_sums(values.new_ones(len(values)), tokens).clamp(min=1.0)


def of_token(log_ratio: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Each token's own ratio."""
    return bounded_exp(log_ratio)


def geometric(log_ratio: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Geometric mean of the row's ratios (GSPO, arXiv 2507.18071, eq. 7)."""
    return bounded_exp(row_means(log_ratio, tokens)).to(log_ratio.dtype)


def product(log_ratio: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Product of the row's ratios: the ratio of the probabilities of the whole row."""
    return bounded_exp(row_sums(log_ratio, tokens)).to(log_ratio.dtype)


LEVELS: dict[str, Level] = {"token": of_token, "geometric": geometric, "product": product}
"""Importance ratios by their name in `learner.loss_options.correction_level`."""
