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
    most = np.maximum.reduce(logprobs)
    if np.minimum.reduce(logprobs) >= LEAST_LOGPROB and most <= ROUNDING:  # both are false for NaN
        return np.minimum(logprobs, np.float32(0)) if most > 0 else logprobs
    place = int(np.flatnonzero(~((logprobs >= LEAST_LOGPROB) & (logprobs <= ROUNDING)))[0])
    raise ValueError(
        f"token {first + place} has log-prob {logprobs[place]:g}; expected the natural logarithm of a probability, "
        f"from {LEAST_LOGPROB:g} to 0"
    )


def check_range(name: str, values: Any, least: int | None = None, most: int | None = None) -> None:
    """Check that all numbers of an array [T] are within bounds; None: the type of the array has no number past it.

    Raises:
        ValueError: one is not.
    """
    if not len(values):
        return
    if least is not None and np.minimum.reduce(values) < least:
        place = int(np.flatnonzero(values < least)[0])
        raise ValueError(f"{name} {place} is {values[place]}; expected at least {least}")
    if most is not None and np.maximum.reduce(values) > most:
        place = int(np.flatnonzero(values > most)[0])
        raise ValueError(f"{name} {place} is {values[place]}; expected at most {most}")
