"""Rows into micro-batches of nearly equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def micro_batches(lengths: Sequence[int], *, micro_batch_tokens: int) -> list[npt.NDArray[np.intp]]:
    """Cut rows into micro-batches whose padded size stays within a token budget.

    Rows are sorted by length, longest first: so little is padded, and a batch that does not fit in memory
    fails on its first micro-batch. Equal lengths keep their order, so the cut is deterministic.

    Args:
        lengths: [R] tokens of each row.
        micro_batch_tokens: largest rows x longest row. A single longer row gets a micro-batch of its own.

    Returns:
        Row indices per micro-batch; together each row exactly once.
    """
    if micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens is {micro_batch_tokens}; a micro-batch holds at least one token")
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        longest = max(int(sizes[order[start]]), 1)
        rows = max(micro_batch_tokens // longest, 1)
        batches.append(order[start : start + rows])
        start += rows
    return batches


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens that is padding, in [0, 1); 0.0 where there is nothing.

    Args:
        batches: lengths of the rows of each micro-batch, which is padded to its longest row.
    """
    padded = sum(len(lengths) * max(lengths) for lengths in batches)
    return 1.0 - sum(map(sum, batches)) / padded if padded else 0.0
