"""Attention of ranks that share the tokens of documents: keys and values of all ranks are gathered.

Exchanges are separate operations for the compiler, so that a layer stays one graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.training.context_parallel.exchange import count, gathered, summed
from asyncrl.training.context_parallel.ring_attention import chunk_attention, takes_chunks
from asyncrl.training.run_attention import Runs, run_attention


class Segments(NamedTuple):
    """Runs of queries of this rank, of which each sees a document up to its own end."""

    keys: torch.Tensor  # [K] places of all that they see, run after run, among the keys of all ranks
    uses: torch.Tensor  # [2, keys of all ranks] places among the K of each key, which two runs see at most; else K
    queries: tuple[int, ...]  # length of each run
    seen: tuple[int, ...]  # number of keys of each, the queries themselves last
    runs: tuple[Runs, Runs]  # the same, of queries and their visible keys
    alike: int = 0  # documents, where these are of one length and best attended to by chunks; else 0


def segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, *, scale: float | None = None
) -> torch.Tensor:
    """Compute the causal attention of this rank's queries.

    Args:
        query: [T, heads, D].
        key: [T, key-value heads, D] of this rank.
        value: as `key`, with its own D.
        scale: of the products, 1 / sqrt(D) where left out.

    Returns:
        [T, heads, D of values].
    """
    if segments.alike and takes_chunks(query, value):
        return chunk_attention(query, key, value, segments.alike, scale=scale)
    sizes = [key.shape[-1], value.shape[-1]]
    key, value = _seen(torch.cat((key, value), -1), segments.keys, segments.uses).split(sizes, -1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return run_attention((query, key, value), *segments.runs, scale=scale)
    heads = [one.transpose(0, 1)[None] for one in (query, key, value)]
    lengths = segments.queries, segments.seen, segments.seen
    cut = [torch.split(one, list(sizes), dim=2) for one, sizes in zip(heads, lengths, strict=True)]
    parts = [_up_to_the_end(*run, scale=scale) for run in zip(*cut, strict=True)]
    return torch.cat(parts, 2)[0].transpose(0, 1)


def _up_to_the_end(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Attend to keys of which the last are the queries' own."""
    own, seen = queries.shape[2], keys.shape[2]
    mask = torch.ones(own, seen, dtype=torch.bool, device=queries.device).tril(seen - own)
    grouped = queries.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=grouped)


@torch.library.custom_op("asyncrl::seen", mutates_args=())
def _seen(own: torch.Tensor, keys: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """Return rows of all ranks, [K, ...], from those of this rank, [T, ...]: see `Segments`."""
    every, work = gathered(own)
    work.wait()
    return every.flatten(0, 1).index_select(0, keys)


@torch.library.custom_op("asyncrl::seen_gradient", mutates_args=())
def _seen_gradient(grad: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """Return the gradient of this rank's rows: the library's exchange, but sums in one order, not atomic additions."""
    padded = torch.cat((grad, grad.new_zeros(1, *grad.shape[1:])))
    both = padded.index_select(0, uses[0]) + padded.index_select(0, uses[1])
    own, work = summed(both.view(count(), -1, *grad.shape[1:]))
    work.wait()
    return own


@_seen.register_fake
def _seen_shape(own: torch.Tensor, keys: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return own.new_empty(len(keys), *own.shape[1:])


@_seen_gradient.register_fake
def _seen_gradient_shape(grad: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(uses.shape[1] // count(), *grad.shape[1:])


def _keep_uses(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward_of_seen(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (uses,) = ctx.saved_tensors
    return _seen_gradient(grad, uses), None, None


_seen.register_autograd(_backward_of_seen, setup_context=_keep_uses)
