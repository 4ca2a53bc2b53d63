"""Lag: versions between the weights a token was sampled by and the weights it updates.

A token sampled by version v and trained by batch s has lag s - 1 - v, because batch s is applied to
version s - 1. Supervised tokens carry version -1 and have no lag.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topics.trajectories import VersionCount
from topics.wire import Int32Array, UInt8Array

SUPERVISED = -1
"""The version of a token that no policy sampled."""


def open_groups(batch_groups: int, max_lag: int) -> int:
    """Return how many groups may be open at once: issued, and neither in a trained batch nor dropped.

    Those of the batch in training, and of `max_lag` more: the last of them is trained `max_lag` steps later.
    """
    return (max_lag + 1) * batch_groups


USUAL_SIGMA = 0.8
"""Sigma of the logarithm of lengths that is assumed before lengths were observed."""


def slots_within_lag(rows: int, max_lag: int, *, sigma: float = USUAL_SIGMA) -> int:
    """Return how many trajectories may be sampled at once so that about 2 % of their tokens become too old.

    With S of them, one of mean length takes S / rows batches, and a long one several times as many. The result is
    `max_lag * rows / 4` at a sigma of 0.8, and `max_lag * rows / 5` at 1.2; `benchmarks/loop_model.py` simulates it.

    Args:
        rows: trajectories of a batch.
        max_lag: greatest lag, in versions.
        sigma: of the logarithm of the lengths.
    """
    return max(1, int(max_lag * rows / (2 + 2.5 * sigma))) if max_lag else rows


def token_lags(versions: Int32Array, *, step: int | npt.NDArray[np.int_]) -> npt.NDArray[np.int32]:
    """Lag of every token in batch `step`.

    Args:
        versions: [T] version that sampled each token, -1 for none.
        step: number of the batch, from 1; or [T] that of each token.

    Returns:
        [T] lags in versions, never below 0 (a token of an older lineage may carry a larger version); 0 where
        the version is -1.
    """
    lags: npt.NDArray[np.int32] = np.maximum(step - 1 - versions, 0).astype(np.int32, copy=False)
    lags[versions == SUPERVISED] = 0
    return lags


def split_lags(
    versions: Int32Array, lengths: npt.NDArray[np.int_], *, steps: npt.NDArray[np.int_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Lags of the tokens of rows, in their two parts.

    Args:
        versions: [T] version that sampled each token of all rows end to end, -1 for none.
        lengths: [R] tokens of each row, at least 1.
        steps: [R] number of the batch of each row, from 1.

    Returns:
        [T] lag in the queue, which is the lag of the newest token of the row; and [T] lag in flight, the rest. Both add
        up to `token_lags`.
    """
    lags, sampled = token_lags(versions, step=np.repeat(steps, lengths)), versions != SUPERVISED
    least = np.minimum.reduceat(np.where(sampled, lags, np.iinfo(np.int32).max), np.cumsum(lengths) - lengths)
    in_queue = np.where(sampled, np.repeat(least, lengths), 0).astype(np.int32, copy=False)
    return in_queue, lags - in_queue


def fresh_mask(versions: Int32Array, mask: UInt8Array, *, min_version: int) -> UInt8Array:
    """Clear the mask of every token sampled before `min_version`.

    Args:
        versions: [T] version that sampled each token, -1 where supervised (always fresh).
        mask: [T] 1 where the token is trainable.
        min_version: oldest version still trained on.

    Returns:
        [T] a new mask, nowhere larger than the given one.
    """
    fresh: UInt8Array = mask * ((versions >= min_version) | (versions == SUPERVISED))
    return fresh


def fresh_share(counts: Sequence[VersionCount], *, min_version: int) -> float:
    """Share of a trajectory's trainable tokens that `fresh_mask` keeps; 1.0 without trainable tokens."""
    trainable = sum(count.tokens for count in counts)
    fresh = sum(count.tokens for count in counts if count.version >= min_version or count.version == SUPERVISED)
    return fresh / trainable if trainable else 1.0


def lag_histogram(versions: Int32Array, mask: UInt8Array, *, step: int) -> dict[int, int]:
    """Count the trained tokens of each lag.

    Args:
        versions: [T] version that sampled each token, -1 where supervised (not counted).
        mask: [T] 1 where the token is trained on.
        step: number of the batch, from 1.

    Returns:
        Tokens by lag in versions, ascending, without empty entries.
    """
    # Runs of equal tokens are far fewer than tokens.
    changes = (versions[1:] != versions[:-1]) | (mask[1:] != mask[:-1])
    begins = np.append(0, np.flatnonzero(changes) + 1)[: len(versions)]
    lengths = np.diff(begins, append=len(versions))
    counted = (mask[begins] != 0) & (versions[begins] != SUPERVISED)
    lags, places = np.unique(token_lags(versions[begins][counted], step=step), return_inverse=True)
    counts = np.bincount(places, weights=lengths[counted]).astype(int)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))
