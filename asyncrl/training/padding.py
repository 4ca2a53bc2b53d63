"""Rows of different lengths as the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.token_loss import Tokens


class PaddedRows(NamedTuple):
    """One micro-batch: N trained tokens of R rows, padded on the right to T inputs."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # arguments of Policy.forward
    tokens: Tokens  # [N] each


def pad_rows(rows: Sequence[TrainRow], device: torch.device, columns: Sequence[str] = ()) -> PaddedRows:
    """Pad rows; the last token of a row predicts nothing and is only a target.

    Args:
        rows: at least one, each with at least two tokens, and with these columns.
        device: where the tensors are put.
    """
    lengths = np.array([len(row.tokens) for row in rows])
    inside = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(inside.shape, np.int64)
    tokens[inside] = np.concatenate([row.tokens for row in rows])
    flat = trained_places(rows)
    trained = np.zeros(inside.shape, np.bool_)
    trained[inside] = flat
    trained = trained[:, 1:]

    def on_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def of_tokens(values: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
        return on_device(np.concatenate(values)[flat])

    owner = np.nonzero(trained)[0]
    temperatures = np.array([row.temperature for row in rows], dtype=np.float32)[owner]
    return PaddedRows(
        inputs=(
            on_device(np.ascontiguousarray(tokens[:, :-1])),
            on_device(np.flatnonzero(trained)),
            on_device(tokens[:, 1:][trained]),
            on_device(temperatures),
        ),
        tokens=Tokens(
            behaviour=of_tokens([row.logprobs for row in rows]),
            advantages=of_tokens([row.advantages for row in rows]),
            weights=of_tokens([row.weights for row in rows]),
            rows=on_device(owner),
            columns={name: of_tokens([row.columns[name] for row in rows]) for name in columns},
        ),
    )


def trained_places(rows: Sequence[TrainRow]) -> npt.NDArray[np.bool_]:
    """Mask of the tokens that are trained on, of all rows end to end; never the first of a row."""
    flat: npt.NDArray[np.bool_] = np.concatenate([row.mask for row in rows]) != 0
    flat[np.cumsum([0, *(len(row.mask) for row in rows[:-1])])] = False
    return flat


def unpadded(values: torch.Tensor, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
    """Values of the trained tokens of a micro-batch, [N], as one array [T] for each row, 0 elsewhere."""
    flat = trained_places(rows)
    column = np.zeros(len(flat), np.float32)
    column[flat] = values.float().cpu().numpy()
    return np.split(column, np.cumsum([len(row.mask) for row in rows[:-1]]))
