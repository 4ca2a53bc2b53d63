"""Rows of different lengths as the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.batches import TrainRow
from asyncrl.algorithms.losses import Tokens

WEIGHTLESS = TrainRow(
    trajectory_id="",
    tokens=np.zeros(2, np.int32),
    mask=np.array([0, 1], np.uint8),
    logprobs=np.zeros(2, np.float32),
    versions=np.full(2, -1, np.int32),
    advantage=0.0,
    weight=0.0,
)
"""A row that changes nothing."""


class PaddedRows(NamedTuple):
    """One micro-batch: N trained tokens of R rows, padded on the right to T inputs."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # arguments of Policy.forward
    tokens: Tokens  # [N] each


def pad_rows(rows: Sequence[TrainRow], device: torch.device) -> PaddedRows:
    """Pad rows; the last token of a row predicts nothing and is only a target.

    Args:
        rows: at least one, each with at least two tokens.
        device: where the tensors are put.
    """
    lengths = np.array([len(row.tokens) for row in rows])
    inside = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(inside.shape, np.int64)
    tokens[inside] = np.concatenate([row.tokens for row in rows])
    behaviour = np.zeros(inside.shape, np.float32)
    behaviour[inside] = np.concatenate([row.logprobs for row in rows])
    trained = np.zeros(inside.shape, np.bool_)
    trained[inside] = np.concatenate([row.mask for row in rows])
    trained = trained[:, 1:]
    owner = np.nonzero(trained)[0]

    def of_row(values: list[float]) -> npt.NDArray[np.float32]:
        return np.array(values, dtype=np.float32)[owner]

    def on_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return PaddedRows(
        inputs=(
            on_device(np.ascontiguousarray(tokens[:, :-1])),
            on_device(np.flatnonzero(trained)),
            on_device(tokens[:, 1:][trained]),
            on_device(of_row([row.temperature for row in rows])),
        ),
        tokens=Tokens(
            behaviour=on_device(behaviour[:, 1:][trained]),
            advantages=on_device(of_row([row.advantage for row in rows])),
            weights=on_device(of_row([row.weight for row in rows])),
        ),
    )
