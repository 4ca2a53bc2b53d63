"""Names of tensors on disk: transformers has the experts of a layer in two tensors, files have one of each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.training.host_copy import Source
from asyncrl.training.tensor_files import TensorFiles

Index: TypeAlias = tuple[int | slice, ...]

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a model by name, and buffers that are stored on disk: correction biases of routers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    """Names on disk of a tensor in memory, each with the part of it that has this name; `()` is the whole.

    Args:
        shape: of the tensor; experts have [E, 2F, H], gates before up projections, or [E, H, F].
    """
    if name.endswith(_GATE_UP):
        ffn = shape[1] // 2
        kinds: dict[str, Index] = {"gate_proj": (slice(0, ffn),), "up_proj": (slice(ffn, 2 * ffn),)}
    elif name.endswith(_DOWN):
        kinds = {"down_proj": ()}
    else:
        return {name: ()}
    prefix = name.rpartition(".")[0]
    return {
        f"{prefix}.{expert}.{kind}.weight": (expert, *rows)
        for kind, rows in kinds.items()
        for expert in range(shape[0])
    }


def shapes_on_disk(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names on disk of a tensor in memory, with the shapes that they have there."""
    whole = torch.empty(shape, device="meta")
    return {part: tuple(whole[index].shape) for part, index in parts_of(name, shape).items()}


def divided(source: Source, shape: tuple[int, ...]) -> Iterator[Source]:
    """Yield a tensor under its names on disk.

    Args:
        source: a parameter, or what an optimiser has for it: of its shape, or one number.
        shape: of the parameter.
    """
    tensor: Any = source.tensor
    sharded = isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1
    for name, index in parts_of(source.name, shape).items():
        part, rest = tensor, source.rest
        if index and tensor.ndim:
            part = _Part(tensor, index) if sharded else tensor[index]
            rest = rest[index] if rest is not None else None
        yield source._replace(name=name, tensor=part, rest=rest)


def read_whole(files: TensorFiles, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Put a tensor in memory together from files."""
    parts = parts_of(name, shape)
    if len(parts) == 1 and name in parts:
        return files[name]
    whole = torch.empty(shape)
    for part, index in parts.items():
        whole[index] = files[part]
    return whole


class _Part:
    """An expert of a tensor whose experts lie on several ranks, as FSDP2 deals them out: one has all of this one.

    See `asyncrl.training.host_copy.Gathered`.
    """

    def __init__(self, tensor: DTensor, index: Index) -> None:
        self._tensor = tensor
        expert, *rows = index
        assert isinstance(expert, int)
        holder, number = divmod(expert, -(-tensor.shape[0] // tensor.device_mesh.size()))
        self._index, self.holders = (number, *rows), (holder,)
        self.shape = tuple(torch.empty(tensor.shape[1:], device="meta")[tuple(rows)].shape)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def whole(self, to: int) -> torch.Tensor | None:
        return self._tensor.to_local()[self._index] if dist.get_rank() == to else None
