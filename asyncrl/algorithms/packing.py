"""Rows into micro-batches of a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MULTIPLE = 128  # tokens to which a packed sequence is filled up on GPUs: fewer shapes, whole tiles of the kernels


def first_fit(lengths: Sequence[int], budget: int) -> list[npt.NDArray[np.intp]]:
    """Cut rows into micro-batches whose tokens stay within a budget: first fit decreasing.

    Every row, the longest first, goes to the first micro-batch with room for it, which needs at most 11/9 of the least
    possible number and one more (Johnson et al. 1974). Equal lengths keep their order, so the cut is deterministic.

    Args:
        lengths: [R] tokens of each row.
        budget: largest sum of a micro-batch. A longer row gets a separate micro-batch.

    Returns:
        Row indices per micro-batch, longest first; together each row exactly once.
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens is {budget}; a micro-batch holds at least one token")
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    if 0 < sizes.sum() <= budget:
        return [order]
    batches: list[list[int]] = []
    room = np.zeros(0, np.int64)  # of each micro-batch
    for index in order.tolist():
        fits = np.flatnonzero(room >= sizes[index])
        if len(fits):
            batches[fits[0]].append(index)
            room[fits[0]] -= sizes[index]
        else:
            batches.append([index])
            room = np.append(room, budget - sizes[index])
    return [np.array(batch, dtype=np.intp) for batch in batches]
