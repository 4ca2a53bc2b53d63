"""Rows of every kind of shape, with which a trainer compiles its layers before the first batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.algorithms.rows import TOP, TrainRow
from asyncrl.training.packing import LONG

_COMMON = 16  # first tokens that rows of a micro-batch have in common
# Two sizes of each kind: torch compiles the second one for all sizes. A length differs from every other size of its
# pass, or torch would take both for one number.
_SEVERAL = [[100, 90], [300, 205, 70]]
_ONE = [[200], [333]]
_EQUAL = [[LONG + 2] * 2, [LONG + 301] * 3]


def first_rows(budget: int, context: int, columns: Sequence[str] = (), *, top: int = 1) -> list[list[TrainRow]]:
    """Return the rows of one micro-batch each: several of different lengths, one, and several of equal length.

    Args:
        budget: tokens of a micro-batch. Kinds that it has no room for are left out.
        context: longest row.
        columns: that the rows have.
        top: number of tokens in each place of the column `TOP`.
    """
    passes = [lengths for lengths in [*_SEVERAL, *_ONE, *_EQUAL] if max(lengths) <= context and sum(lengths) <= budget]
    return [[_row(length, columns, top) for length in lengths] for lengths in passes]


def _row(length: int, columns: Sequence[str], top: int) -> TrainRow:
    """Return a row that counts as nothing in a loss, but has a gradient."""
    tokens, mask, zeros = np.zeros(length, np.int32), np.ones(length, np.uint8), np.zeros(length, np.float32)
    tokens[_COMMON:], mask[0] = length % 2, 0
    return TrainRow(
        trajectory_id="",
        tokens=tokens,
        mask=mask,
        logprobs=zeros,
        versions=np.zeros(length, np.int32),
        advantages=zeros + 1,
        weights=zeros + 1 / length,
        columns={name: np.zeros((length, top, 2), np.float32) if name == TOP else zeros for name in columns},
    )
