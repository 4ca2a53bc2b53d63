"""One segment as a trainer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from topics.prompts import NO_ESTIMATOR
from topics.wire import Float32Array, Int32Array, UInt8Array

TOP = "teacher_top"
"""Column [T, K, 2] of the tokens that a teacher finds most probable at each place: id and log-prob."""


class Routed(NamedTuple):
    """The experts of a segment's tokens, as far as this rank has them."""

    rows: UInt8Array  # [T, B]; see `Answer.routing`; zeros if unknown or held by another rank
    known: npt.NDArray[np.bool_]  # [T] whether they were recorded, on any rank


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """A segment with what its tokens weigh. Arrays have one length T."""

    trajectory_id: str
    tokens: Int32Array  # [T]
    mask: UInt8Array  # [T] 1 where the token is trained on, after stale masking; 0 at position 0
    logprobs: Float32Array  # [T] natural log of the sampler's probability at `temperature`
    versions: Int32Array  # [T]
    advantages: Float32Array  # [T]
    weights: Float32Array  # [T], see `aggregation`; counts only where the mask is 1
    temperature: float = 1.0
    step: int = 1  # number of its batch, from which lags are counted
    estimator: str = NO_ESTIMATOR  # of its group's advantages, a name in `ADVANTAGES`
    columns: dict[str, Float32Array] = field(
        default_factory=dict
    )  # [T] each, except `TOP`: further columns of the objective
    hinted: Sequence[Int32Array] = ()  # other prompts of its reply, [P] each; see `Segment`
    routing: UInt8Array | None = None  # [T, B] experts of each token when it was sampled; see `Routed`
    routed: npt.NDArray[np.bool_] | None = None  # [T] whether they were recorded; see `Routed`

    @property
    def unrouted(self) -> int:
        """Return the number of trained tokens that were sampled and whose experts are not known."""
        trained = (self.mask[1:] != 0) & (self.versions[1:] >= 0)
        return int(trained.sum() if self.routed is None else (trained & ~self.routed[:-1]).sum())


def weightless(columns: Sequence[str] = ()) -> TrainRow:
    """A row that changes nothing, with zeros in these columns."""
    zeros = np.zeros(2, np.float32)
    return TrainRow(
        trajectory_id="",
        tokens=np.zeros(2, np.int32),
        mask=np.array([0, 1], np.uint8),
        logprobs=zeros,
        versions=np.full(2, -1, np.int32),
        advantages=zeros,
        weights=zeros,
        columns={name: np.zeros((2, 1, 2), np.float32) if name == TOP else zeros for name in columns},
    )
