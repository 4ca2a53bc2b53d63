"""Activations in host memory from the forward to the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class _OnHost(NamedTuple):
    """A tensor that is in host memory."""

    content: torch.Tensor
    device: torch.device


def activations_on_host(length: int) -> AbstractContextManager[None]:
    """Return a context in which autograd keeps hidden states in host memory.

    Layers that are recomputed keep only these. Copies follow the computation in the order of the GPU, so they need no
    other stream, and the host does not wait for them.

    Args:
        length: tokens of the sequence, T; tensors of [1, T, ...] are hidden states.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | _OnHost:
        if not (tensor.ndim == 3 and tensor.shape[:2] == (1, length) and tensor.is_floating_point()):
            return tensor
        content = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return _OnHost(content.copy_(tensor.detach(), non_blocking=True), tensor.device)

    def unpack(kept: torch.Tensor | _OnHost) -> torch.Tensor:
        return kept.content.to(kept.device, non_blocking=True) if isinstance(kept, _OnHost) else kept

    hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return hooks
