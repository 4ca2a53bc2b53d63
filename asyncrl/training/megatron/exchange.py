"""Exchanges between the ranks that share the tokens of documents; other work may overlap them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def gathered(own: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather the tensors of all ranks, [C, ...], and return what to wait for."""
    every = own.new_empty(parallel_state.get_context_parallel_world_size(), *own.shape)
    group = parallel_state.get_context_parallel_group()
    return every, dist.all_gather_into_tensor(every.flatten(0, 1), own.contiguous(), group=group, async_op=True)


def summed(every: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """Begin to sum the tensors for this rank out of those of all ranks for each, [C, ...]; see `gathered`."""
    own = torch.empty_like(every[0])
    group = parallel_state.get_context_parallel_group()
    return own, dist.reduce_scatter_tensor(own, every.flatten(0, 1), group=group, async_op=True)
