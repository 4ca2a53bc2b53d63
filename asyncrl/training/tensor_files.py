"""Tensors read from the files of a checkpoint or model, one at a time; quantised ones are dequantised."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.data.model_dir import PACKED, PACKED_COLUMNS, WEIGHT
from asyncrl.data.quantisation import BLOCK, GROUP
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.weights.quantised import plain_names, read_plain


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor, on the devices of `like`."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class TensorFiles:
    """Tensors in the files of a stem, read on demand."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.names: set[str] = set()
        self._files: dict[str, Any] = {}  # the open file that holds a tensor, by its name there
        self._stack = ExitStack()
        self._paths = sorted(directory.glob(f"{stem}*.safetensors"))
        if not self._paths:
            raise FileNotFoundError(f"no {stem}.safetensors in {directory}")

    def __enter__(self) -> TensorFiles:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)
        self.names = plain_names(self._files)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check(name)
        return read_plain(name, self._files, lambda stored: self._files[stored].get_tensor(stored))

    def narrow(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Read a part of a tensor: of a dimension from start to stop, or to its end. Blocks are read whole."""
        whole, before = self.shape(name)[dim], (slice(None),) * dim
        if name in self._files and self._files[name].get_slice(name).get_dtype() != "F8_E4M3":
            part: torch.Tensor = self._files[name].get_slice(name)[(*before, slice(start, stop))]
            return part
        first, last = start - start % BLOCK, stop + -stop % BLOCK

        def read(stored: str) -> torch.Tensor:
            found = self._files[stored].get_slice(stored)
            length = found.get_shape()[dim]
            each = next(one for one in (1, PACKED_COLUMNS, GROUP, BLOCK) if -(-whole // one) == length)
            held: torch.Tensor = found[(*before, slice(first // each, min(last // each, length)))]
            return held

        return read_plain(name, self._files, read)[(*before, slice(start - first, stop - first))]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read for it."""
        self._check(name)
        if name in self._files:
            return tuple(self._files[name].get_slice(name).get_shape())
        packed = name.removesuffix(WEIGHT) + PACKED
        rows, columns = self._files[packed].get_slice(packed).get_shape()
        return rows, columns * PACKED_COLUMNS

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise CheckpointError(
                f"{self.directory}: its {len(self._paths)} files have no tensor {name}; it is torn, or of another "
                "model: use another"
            )
