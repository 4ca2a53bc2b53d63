"""FSDP2 (arXiv 2304.11277): a model whose parameters lie over ranks, which exchange weights and gradients.

Each rank has its part of the masters, the moments and the gradient of a step. Products need whole weights, and give
whole gradients. Exchanged in each micro-batch, a rank has them of a layer or two at a time; once a step, of all layers
from the first micro-batch to the last one, whose backward pass sums gradients over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

T = TypeVar("T")

Exchange: TypeAlias = Literal["auto", "step", "micro_batch"]
"""How often ranks exchange weights and gradients; `auto` is once a step if that leaves two thirds of the memory."""

_SHARE = 1 / 3
_GRADIENT = torch.float32


class Sharded:
    """A model that is sharded over all ranks."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        """
        Args:
            model: its root; parameters outside layers are gathered together.
            layers: each is gathered for itself.
            device: of this rank.
            dtype: of the matrix products.
        """
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._bytes = sum(one.numel() * _bytes(one, dtype) for one in model.parameters())  # before each has a part
        self._device = device
        # Inputs keep their type: the temperatures and positions of rotary embeddings must not be rounded.
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_GRADIENT, cast_forward_inputs=False)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        # A root stays gathered after a pass by default: after one without a backward pass, the next would meet
        # parameters from before a change of the weights.
        self._root: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
        self.once = False

    def exchange(self, how: Exchange) -> None:
        """Choose how often passes with a gradient exchange weights and gradients, equally on all ranks."""
        self.once = how == "step"
        if how == "auto":
            least = torch.tensor(_memory(self._device), dtype=torch.float64, device=self._device)
            dist.all_reduce(least, dist.ReduceOp.MIN)  # their GPUs may differ
            self.once = self._bytes <= _SHARE * float(least)

    def passes(self, batches: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of a gradient; each has had its backward pass when the next one is asked for."""
        if not self.once:
            yield from batches
            return
        self._root.set_reshard_after_forward(False)
        try:
            for number, batch in enumerate(batches, 1):
                self._root.set_requires_gradient_sync(number == len(batches))
                self._root.set_reshard_after_backward(number == len(batches))
                yield batch
        finally:
            self._root.set_reshard_after_forward(True)
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)


def _bytes(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes that a weight takes once a step: in the type of the products, and its gradient."""
    return dtype.itemsize + (_GRADIENT.itemsize if parameter.requires_grad else 0)


def _memory(device: torch.device) -> float:
    """Bytes that a rank may take."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return float(whole * torch.cuda.get_per_process_memory_fraction(device))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / dist.get_world_size()
