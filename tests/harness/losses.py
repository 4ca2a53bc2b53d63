"""Inputs of losses, made by hand or at random."""

import numpy as np
import torch

from asyncrl.algorithms.token_loss import Tokens

ROWS = [0] * 5 + [1] * 7 + [2] * 4 + [3] * 8


def tokens_of(behaviour, advantages, weights, *, rows=None, in_queue=None, in_flight=None, **columns):
    of_tokens = (torch.as_tensor(values, dtype=torch.float32) for values in (behaviour, advantages, weights))
    numbers = (torch.tensor(values or [0] * len(weights)) for values in (rows, in_queue, in_flight))
    return Tokens(
        *of_tokens, *numbers, {name: torch.as_tensor(values, dtype=torch.float32) for name, values in columns.items()}
    )


def random_case(seed=7):
    """Log-probs, and tokens of four rows with ratios to the sampler around 1; one of five tokens has no weight."""
    rng, size = np.random.default_rng(seed), len(ROWS)
    logprobs = -rng.exponential(size=size) - 0.2
    behaviour = np.minimum(logprobs + 0.4 * rng.normal(size=size), -0.01)
    weights = np.where(np.arange(size) % 5 == 3, 0.0, rng.uniform(0.1, 1.0, size))
    advantages = rng.normal(size=4)[ROWS]
    columns = {name: -rng.exponential(size=size) for name in ("proximal", "reference", "entropy")}
    columns["m2po"] = np.arange(size) % 6 == 2
    lags = {"in_queue": [(0, 1, 4, 2)[row] for row in ROWS], "in_flight": rng.integers(0, 3, size).tolist()}
    return logprobs, tokens_of(behaviour, advantages, weights, rows=ROWS, **lags, **columns)
