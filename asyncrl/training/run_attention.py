"""Attention of runs of queries to runs of keys by one kernel, on a GPU in 16 bits."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

if torch.version.cuda or torch.version.hip:  # a CPU never uses the kernel, and its import loads torch's compiler
    from torch.nn.attention.varlen import varlen_attn

    GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    """Newer versions of torch need an argument where heads are grouped, older ones have no such argument."""


class Runs(NamedTuple):
    """Runs of tokens that follow one another."""

    ends: torch.Tensor  # [R + 1] int32: 0, and the end of each
    longest: int  # at least the length of the longest one


def run_attention(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    queries: Runs,
    keys: Runs,
    *,
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """Compute the attention of runs of queries to as many runs of keys, whose last are the queries' own, on a GPU.

    Args:
        heads: queries [T, heads, D], keys [K, key heads, D], and values as these, of D channels at most.
        queries: the runs of the T.
        keys: the runs of the K.
        scale: of the products, 1 / sqrt(D) where left out.
        window: number of tokens that one sees, itself among them; 0 for all.

    Returns:
        [T, heads, D of values].
    """
    size, channels = heads[0].shape[-1], heads[2].shape[-1]
    even = size + -size % 8  # the kernel takes one number of channels, a multiple of 8
    query, key, value = (pad(one, (0, even - one.shape[-1])) if one.shape[-1] < even else one for one in heads)
    how: dict[str, Any] = {"scale": scale or size**-0.5, "window_size": (window - 1, 0), **GROUPED_HEADS}
    attended: Any = varlen_attn(query, key, value, queries.ends, keys.ends, queries.longest, keys.longest, **how)
    return attended[..., :channels]  # type: ignore[no-any-return]
