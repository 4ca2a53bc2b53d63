"""Exchanges between the ranks that share the tokens of documents; other work may overlap them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

_groups: list[dist.ProcessGroup] = []  # the one in use; operations that are compiled take no group


def use_group(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group share the tokens of documents from here on."""
    _groups[:] = [group]


def share_tokens(device: torch.device, ranks: int) -> dist.ProcessGroup | None:
    """Let ranks that follow one another share the tokens of documents.

    Args:
        ranks: number of those that share; a divisor of all.

    Returns:
        The group of the ranks that have other documents; None where no ranks share any.
    """
    if ranks == 1:
        return None
    mesh = init_device_mesh(device.type, (dist.get_world_size() // ranks, ranks))
    use_group(mesh.get_group(1))
    return mesh.get_group(0)


def count() -> int:
    """Return the number of ranks that share the tokens of a document, C."""
    return dist.get_world_size(_groups[0])


def place() -> int:
    """Return the place of this rank among them."""
    return dist.get_rank(_groups[0])


def gathered(own: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather the tensors of all ranks, [C, ...], and return what to wait for."""
    every = own.new_empty(count(), *own.shape)
    return every, dist.all_gather_into_tensor(every.flatten(0, 1), own.contiguous(), group=_groups[0], async_op=True)


def summed(every: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """Begin to sum the tensors for this rank out of those of all ranks for each, [C, ...]; see `gathered`."""
    own = torch.empty_like(every[0])
    return own, dist.reduce_scatter_tensor(own, every.flatten(0, 1), group=_groups[0], async_op=True)


def together(own: torch.Tensor, places: torch.Tensor, whole: int) -> torch.Tensor:
    """Return the values of the tokens of all ranks, [whole, ...].

    Args:
        own: [M, ...] of this rank.
        places: [M] among those of all ranks.
    """
    apply: Callable[..., torch.Tensor] = _Together.apply
    return apply(own, places, whole)


class _Together(torch.autograd.Function):
    """Every rank computes the whole loss, so the gradient of its values is complete."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: torch.Tensor, whole: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        found = own.new_zeros(whole, *own.shape[1:])
        found[places] = own
        dist.all_reduce(found, group=_groups[0])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None
