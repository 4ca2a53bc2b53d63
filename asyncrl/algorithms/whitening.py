"""Advantages on one scale: centered on the mean of all tokens of a batch, and divided by their deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.rows import TrainRow

Values: TypeAlias = npt.NDArray[np.float64]

_VARIANCE_FLOOR = 1e-8


def whitened(rows: Sequence[TrainRow], gathered: Callable[[Values], Values]) -> list[TrainRow]:
    """Rows with (A - mean) / sqrt(variance + 1e-8) of their trained tokens, and 0 elsewhere.

    Mean and unbiased variance are those of the trained tokens of all ranks, so that longer trajectories count more.
    Fewer than two tokens are not changed.

    Args:
        rows: of this rank.
        gathered: returns the values of all ranks from those of one.

    Source: the batch normalisation of REINFORCE++, arXiv 2501.03262, section 3, and of PPO implementations, arXiv
    2006.05990, appendix B.9.
    """
    own = np.concatenate([np.zeros(0), *(row.advantages[row.mask != 0] for row in rows)])
    count, total = gathered(np.array([[len(own), own.sum()]])).sum(0)
    if count < 2:
        return list(rows)
    mean = total / count
    variance = gathered(np.array([((own - mean) ** 2).sum()])).sum() / (count - 1)
    scale = 1.0 / np.sqrt(variance + _VARIANCE_FLOOR)
    return [
        replace(row, advantages=np.where(row.mask != 0, (row.advantages - mean) * scale, 0.0).astype(np.float32))
        for row in rows
    ]
