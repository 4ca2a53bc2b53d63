"""One check of the numbers that engines report and trajectories carry."""

from __future__ import annotations

from typing import Any

import numpy as np

from topics.wire import Float32Array

ROUNDING = 1e-4
"""A log-prob this far above 0 is a rounding error."""

LEAST_LOGPROB = -1e4
"""No sampled token has a smaller log-prob."""


def checked_logprobs(logprobs: Float32Array, first: int = 0) -> Float32Array:
    """Return the log-probs [T] of tokens, those above 0 by a rounding error clamped to 0.

    Args:
        logprobs: [T] natural log of probabilities.
        first: number of the first token, for errors.

    Raises:
        ValueError: one is not finite, above 1e-4, or below -1e4.
    """
    if not len(logprobs):
        return logprobs
    most = logprobs.max()
    if logprobs.min() >= LEAST_LOGPROB and most <= ROUNDING:  # both are false for NaN
        return np.minimum(logprobs, np.float32(0)) if most > 0 else logprobs
    place = int(np.flatnonzero(~((logprobs >= LEAST_LOGPROB) & (logprobs <= ROUNDING)))[0])
    raise ValueError(
        f"token {first + place} has log-prob {logprobs[place]:g}; expected the natural logarithm of a probability, "
        f"from {LEAST_LOGPROB:g} to 0"
    )


def check_range(name: str, values: Any, least: int, most: int) -> None:
    """Check that all numbers of an array [T] are within bounds.

    Raises:
        ValueError: one is not.
    """
    if len(values) and not (least <= values.min() and values.max() <= most):
        place = int(np.flatnonzero((values < least) | (values > most))[0])
        raise ValueError(f"{name} {place} is {values[place]}; expected {least} to {most}")
