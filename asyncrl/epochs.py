"""The seeded order of the rows of an epoch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64-bit words."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def epoch_order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of `rows` rows in one epoch.

    Sorting by hashed keys keeps it the same under every version of numpy.

    Returns:
        [rows] int64 row numbers.
    """
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    start, step = _mix(_mix(words) + np.array([1, 2], np.uint64))
    keys = _mix(_mix(np.arange(rows, dtype=np.uint64) + start) ^ step)
    return np.argsort(keys, kind="stable")


def row_at(place: int, rows: int, seed: int) -> int:
    """Return the number of the row at a place of the endless order in which each epoch has each row once."""
    epoch, position = divmod(place, rows)
    return int(epoch_order(rows, seed, epoch)[position])
