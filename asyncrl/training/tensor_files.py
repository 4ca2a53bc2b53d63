"""Tensors read from the files of a checkpoint, one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.training.checkpoint import CheckpointError


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor, on the devices where `like` lies."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class TensorFiles:
    """Tensors in the files of a stem, read as they are asked for."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.names: dict[str, Any] = {}  # the open file that holds a tensor
        self._stack = ExitStack()
        self._paths = sorted(directory.glob(f"{stem}*.safetensors"))
        if not self._paths:
            raise FileNotFoundError(f"no {stem}.safetensors in {directory}")

    def __enter__(self) -> TensorFiles:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self.names |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise CheckpointError(f"{self._paths[0]}: it has no tensor {name}; this checkpoint is torn, use another")
        tensor: torch.Tensor = self.names[name].get_tensor(name)
        return tensor

    def narrow(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Read a part of a tensor: of a dimension from start to stop, or to its end."""
        part: torch.Tensor = self.names[name].get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read for it."""
        return tuple(self.names[name].get_slice(name).get_shape())
