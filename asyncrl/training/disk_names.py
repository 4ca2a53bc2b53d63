"""Names of tensors on disk: transformers renames tensors of a checkpoint as it loads them, and joins those of experts.

Published weights have the names of the checkpoint. transformers knows how to save a model so; the names of each tensor
are taken from a trial with tensors that have no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from asyncrl.data.model_dir import ModelError
from asyncrl.training.host_copy import Source
from asyncrl.training.tensor_files import TensorFiles

Index: TypeAlias = tuple[int | slice, ...]
Parts: TypeAlias = Mapping[str, Index]
"""Names on disk of a tensor in memory, each with the part of it that has this name; `()` is the whole."""

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a model by name, and buffers that are stored on disk: correction biases of routers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


class DiskNames:
    """The names on disk of a model's tensors."""

    def __init__(self, parts: Mapping[str, Parts] | None = None, tied: Collection[str] = ()) -> None:
        """
        Args:
            parts: of each tensor; others have the names of most models with experts, see `_usual_parts`.
            tied: names on disk of tensors that are others once more.
        """
        self._parts = parts or {}
        self.tied = frozenset(tied)

    @classmethod
    def of(cls, model: Any) -> DiskNames:
        """Ask transformers how it would save a model.

        Raises:
            ModelError: a tensor on disk is no part of one in memory.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
        tied = [name for name in getattr(model, "all_tied_weights_keys", None) or {} if name not in shapes]
        traced = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        traced |= {name: torch.empty(0, device="meta") for name in tied}
        origins = {_storage(tensor): name for name, tensor in traced.items()}
        parts: dict[str, dict[str, Index]] = {name: {} for name in traced}
        for on_disk, tensor in _as_saved(model, traced).items():
            origin = origins.get(_storage(tensor))
            index = None if origin is None else _index(traced[origin], tensor)
            if origin is None or index is None:
                raise ModelError(
                    f"{type(model).__name__}: {on_disk} has another layout in a checkpoint than in memory, expected a "
                    "part of one tensor; asyncrl cannot publish such a model"
                )
            parts[origin][on_disk] = index
        return cls(parts, [on_disk for name in tied for on_disk in parts.pop(name)])

    def of_all(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names on disk of tensors in memory, and of tied ones."""
        return {part for name, one in tensors.items() for part in self.parts(name, tuple(one.shape))} | self.tied

    def parts(self, name: str, shape: tuple[int, ...]) -> Parts:
        """Return the parts of a tensor of this shape."""
        return self._parts.get(name) or _usual_parts(name, shape)

    def shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names on disk of a tensor in memory, with the shapes that they have there."""
        whole = torch.empty(shape, device="meta")
        return {part: tuple(whole[index].shape) for part, index in self.parts(name, shape).items()}

    def divided(self, source: Source, shape: tuple[int, ...], prefix: str = "") -> Iterator[Source]:
        """Yield a tensor under its names on disk.

        Args:
            source: a parameter, or what an optimiser has for it: of its shape, or one number.
            shape: of the parameter.
            prefix: of the names that are yielded.
        """
        tensor: Any = source.tensor
        sharded = isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1
        for name, index in self.parts(source.name, shape).items():
            part, rest, adapter = tensor, source.rest, source.adapter
            if index and tensor.ndim:
                part = _Part(tensor, index) if sharded else tensor[index]
                rest = rest[index] if rest is not None else None
                adapter = adapter.part(index) if adapter is not None else None
            yield source._replace(name=prefix + name, tensor=part, rest=rest, adapter=adapter)

    def read(self, files: TensorFiles, name: str, shape: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """Put a tensor in memory together from files."""
        parts = self.parts(name, shape)
        if list(parts.values()) == [()]:
            return files[prefix + next(iter(parts))]
        whole = torch.empty(shape)
        for part, index in parts.items():
            whole[index] = files[prefix + part]
        return whole


def _usual_parts(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    """Return the parts of most models: experts have [E, 2F, H] in memory, gates before up projections, or [E, H, F]."""
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


class _Views(TorchFunctionMode):
    """Parts of tensors stay views of these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with _Views():
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _index(whole: torch.Tensor, part: torch.Tensor) -> Index | None:
    """Return the index of a view of a tensor; None if it is no part in the same order."""
    if whole.shape == part.shape and whole.stride() == part.stride():
        return ()
    first, index = int(part.storage_offset()), list[int | slice]()
    missing = whole.ndim - part.ndim  # dimensions of which the part has one place
    for dimension, stride in enumerate(whole.stride()):
        place, first = divmod(first, stride)
        if dimension < missing:
            index.append(place)
        else:
            index.append(slice(place, place + part.shape[dimension - missing]))
    found = whole[tuple(index)] if missing >= 0 else whole
    same = found.shape == part.shape and found.storage_offset() == part.storage_offset()
    if not same or found.stride() != part.stride():
        return None
    while index and index[-1] == slice(0, whole.shape[len(index) - 1]):
        index.pop()
    return tuple(index)


class _Part:
    """An expert of a tensor whose experts lie on several ranks, as FSDP2 deals them out: one has all of this one.

    See `asyncrl.training.host_copy.Gathered`.
    """

    def __init__(self, tensor: DTensor, index: Index) -> None:
        self._tensor = tensor
        expert, *rows = index
        if not isinstance(expert, int):
            raise ModelError("a tensor on disk is a part of a tensor of several ranks; set learner.ranks = 1")
        holder, number = divmod(expert, -(-tensor.shape[0] // tensor.device_mesh.size()))
        self._index, self.holders = (number, *rows), (holder,)
        self.shape = tuple(torch.empty(tensor.shape[1:], device="meta")[tuple(rows)].shape)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def whole(self, to: int) -> torch.Tensor | None:
        return self._tensor.to_local()[self._index] if dist.get_rank() == to else None
