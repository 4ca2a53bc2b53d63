"""Names of tensors on disk: transformers has the experts of a layer in two tensors, files have one of each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.training.host_copy import Source
from asyncrl.training.tensor_files import TensorFiles

Index: TypeAlias = tuple[int | slice, ...]

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a model by their names, and buffers that lie on disk beside them: corrections of routers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    """Names on disk of a tensor in memory, each with the part of it that has this name; `()` is the whole.

    Args:
        shape: of the tensor; that of experts is [E, 2F, H], the gates before what they open, or [E, H, F].
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
    parts = parts_of(source.name, shape)
    fused = _Fused(tensor, len(parts)) if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 else None
    for name, index in parts.items():
        part, rest = tensor, source.rest
        if index and tensor.ndim:
            part = _Part(fused, index) if fused is not None else tensor[index]
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


class _Fused:
    """A sharded tensor that is gathered once for its parts, which are read one after another, each once."""

    def __init__(self, tensor: DTensor, parts: int) -> None:
        self.tensor = tensor
        self._parts = self._left = parts
        self._known: torch.Tensor | None = None

    def part(self, index: Index) -> torch.Tensor:
        """Return a part. The whole is forgotten with the last one, so that a device never has those of all layers."""
        known = self.tensor.full_tensor() if self._known is None else self._known
        self._left = (self._left or self._parts) - 1
        self._known = known if self._left else None
        return known[index]


class _Part:
    """A part of a sharded tensor; see `asyncrl.training.host_copy.Gathered`."""

    def __init__(self, fused: _Fused, index: Index) -> None:
        self._fused, self._index = fused, index
        self.shape = tuple(torch.empty(fused.tensor.shape, device="meta")[index].shape)

    def numel(self) -> int:
        """Return its number of elements."""
        return torch.Size(self.shape).numel()

    def whole(self) -> torch.Tensor:
        """Gather it."""
        return self._fused.part(self._index)
