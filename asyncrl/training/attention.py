"""Attention within the documents of a packed sequence: no token sees another document, and no mask is built.

On GPUs in 16 bits attention is one variable-length kernel (FlashAttention-2, arXiv 2307.08691), or for documents of
equal length torch's own choice, which on Hopper is nearly twice as fast. Elsewhere it is causal attention of each
document, those of one length that follow one another at once. Dropout is never applied: the trainer's probabilities
must be those of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.training.context_parallel.allgather_attention import Segments, segment_attention
from asyncrl.training.run_attention import Runs, run_attention
from asyncrl.training.transformers_parts import ALL_ATTENTION_FUNCTIONS

DOCUMENTS = "asyncrl_documents"
"""Name of this attention among those of transformers."""


class Documents(NamedTuple):
    """D documents of a sequence of T tokens."""

    positions: torch.Tensor  # [1, T] place of each token in its document
    bounds: torch.Tensor  # [D + 1] int32: 0, and the end of each
    longest: int  # at least the length of the longest one
    groups: tuple[tuple[int, int], ...]  # number and length of documents of one length that follow one another
    alike: int = 0  # D where all are of one length, and are best attended to at once; else 0
    seen: tuple[tuple[int, ...], ...] = ()  # of each group: groups that it sees before its own tokens; see `PrefixTree`
    visible: VisibleKeys | None = None  # the same for kernels that take runs; None if documents see themselves alone
    routing: torch.Tensor | None = None  # [T, B] bytes: see `asyncrl.training.routing`; zeros if unknown
    segments: Segments | None = None  # where other ranks have further tokens of the documents


class VisibleKeys(NamedTuple):
    """The keys that documents see, document after document: K, of a sequence of T tokens."""

    places: torch.Tensor  # [K] index into T of each
    order: torch.Tensor  # [K] numbers of the K by rising place
    uses: torch.Tensor  # [T] number of the K at each place
    runs: Runs  # the K of each document; the last are its own tokens


def document_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    documents: Documents,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention as transformers calls it.

    Args:
        query: [1, heads, T, D].
        key: [1, key heads, T, D].
        value: as `key`.
        documents: of the sequence.
        options: of them `scaling`, of the products, 1 / sqrt(D) where left out; and `sliding_window`, the number of
            tokens that one sees, itself among them; `s_aux`, a logit [heads] that takes part in each softmax; and
            `softcap`, a bound of the products.

    Returns:
        [1, T, heads, D].
    """
    scale, window = options.get("scaling"), options.get("sliding_window") or 0
    dtype = query.dtype
    # The kernel for CPUs in 16 bits has a backward pass that takes five times as long.
    if not query.is_cuda and query.itemsize < 4:
        query, key, value = query.float(), key.float(), value.float()
    if documents.segments is not None:
        query, key, value = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
        return segment_attention(query, key, value, documents.segments, scale=scale).unsqueeze(0).to(dtype), None
    unusual = _Unusual(options.get("s_aux"), options.get("softcap") or 0.0)
    if unusual.sinks is not None or unusual.bound:
        documents = documents._replace(alike=0)
    elif documents.alike and not window:
        return _attended((query, key, value), documents.alike, None, scale, unusual).unsqueeze(0).to(dtype), None
    elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _by_runs((query, key, value), documents, scale=scale, window=window).unsqueeze(0), None
    how: dict[str, Any] = {"scale": scale, "window": window, "unusual": unusual}
    return _by_groups((query, key, value), documents, **how).unsqueeze(0).to(dtype), None


def _by_groups(
    heads: Sequence[torch.Tensor], documents: Documents, *, scale: float | None, window: int, unusual: _Unusual
) -> torch.Tensor:
    """Attention, [T, heads, D], of documents of one length at once."""
    sizes = [count * length for count, length in documents.groups]
    parts = []
    # One split, whose gradient is one copy: that of each slice would be as long as the whole sequence.
    queries, keys, values = (torch.split(one, sizes, 2) for one in heads)
    for number, (count, length) in enumerate(documents.groups):
        seen = documents.seen[number] if documents.seen else ()
        before = sum(sizes[one] for one in seen)
        mask = _band(length, window, heads[0].device, before) if before or 0 < window < length else None
        own = (queries[number], *(_in_order(one, seen, number, count) for one in (keys, values)))
        parts.append(_attended(own, count, mask, scale, unusual))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _by_runs(heads: Sequence[torch.Tensor], documents: Documents, *, scale: float | None, window: int) -> torch.Tensor:
    """Attention, [T, heads, D], by one kernel for all documents, which sees copies of the keys that they share."""
    query, key, value = (tensor.transpose(1, 2).squeeze(0) for tensor in heads)
    queries = keys = Runs(documents.bounds, documents.longest)
    if (visible := documents.visible) is not None:
        sizes, keys = [key.shape[-1], value.shape[-1]], visible.runs
        both = torch.cat((key, value), -1)
        key, value = gathered(both, visible.places, visible.order, visible.uses).split(sizes, -1)
    return run_attention((query, key, value), queries, keys, scale=scale, window=window)


def _in_order(parts: Sequence[torch.Tensor], seen: Sequence[int], number: int, count: int) -> torch.Tensor:
    """Keys or values, [1, heads, T, D], of a group whose documents each see other groups before their own tokens."""
    if not seen:
        return parts[number]
    own = parts[number].reshape(1, parts[number].shape[1], count, -1, parts[number].shape[-1])
    earlier = torch.cat([parts[one] for one in seen], 2).unsqueeze(2).expand(-1, -1, count, -1, -1)
    return torch.cat((earlier, own), 3).flatten(2, 3)


class _Unusual(NamedTuple):
    """Parts of attention that the kernels of torch lack."""

    sinks: torch.Tensor | None = None  # [heads] logits that take part in each softmax
    bound: float = 0.0  # of the products


def _attended(
    tensors: Sequence[torch.Tensor], count: int, mask: torch.Tensor | None, scale: Any, unusual: _Unusual
) -> torch.Tensor:
    """Attention, [T, heads, D], of documents of one length, [1, heads, T, D]; causal without a mask."""
    query, key, value = (
        one.squeeze(0).reshape(one.shape[1], count, -1, one.shape[-1]).transpose(0, 1) for one in tensors
    )
    grouped = query.shape[1] != key.shape[1]
    if unusual.sinks is not None or unusual.bound:
        mask = _band(query.shape[2], 0, query.device) if mask is None else mask
        found = _in_steps((query, key, value), mask, scale or query.shape[-1] ** -0.5, unusual)
        return found.transpose(1, 2).flatten(0, 1)
    found = scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return found.transpose(1, 2).flatten(0, 1)


def _in_steps(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor, scale: float, unusual: _Unusual
) -> torch.Tensor:
    """Attention by its formula, which holds all products at once: [documents, heads, tokens, D]."""
    query, key, value = heads
    repeats = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    products = query @ key.transpose(2, 3) * scale
    if unusual.bound:
        products = unusual.bound * torch.tanh(products / unusual.bound)
    products = products.masked_fill(~mask, -torch.inf)
    if unusual.sinks is not None:
        sinks = unusual.sinks.to(products).view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, sinks), -1)
    shares = products.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return shares.to(value.dtype) @ value


def _band(length: int, window: int, device: torch.device, before: int = 0) -> torch.Tensor:
    """Mask [length, before + length] of the tokens that each one sees."""
    whole = torch.ones(length, before + length, dtype=torch.bool, device=device)
    return whole.tril(before) & whole.triu(before + 1 - window) if window else whole.tril(before)


@torch.library.custom_op("asyncrl::gathered", mutates_args=())
def gathered(own: torch.Tensor, places: torch.Tensor, order: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """Return rows of [T, ...] at places, [K, ...]; see `VisibleKeys`."""
    return own.index_select(0, places)


@torch.library.custom_op("asyncrl::gathered_gradient", mutates_args=())
def _gathered_gradient(grad: torch.Tensor, order: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """Return the sum of the gradients at each place, in float32 and in one order: atomic additions would round each."""
    sorted_by_place = grad.index_select(0, order).flatten(1)
    exact = sorted_by_place.float() if grad.itemsize < 4 else sorted_by_place
    found = torch.segment_reduce(exact, "sum", lengths=uses, axis=0, unsafe=True)
    return found.to(grad.dtype).view(len(uses), *grad.shape[1:])


@gathered.register_fake
def _gathered_shape(own: torch.Tensor, places: torch.Tensor, order: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return own.new_empty(len(places), *own.shape[1:])


@_gathered_gradient.register_fake
def _gathered_gradient_shape(grad: torch.Tensor, order: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(len(uses), *grad.shape[1:])


def _keep_order(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _backward_of_gathered(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _gathered_gradient(grad, *ctx.saved_tensors), None, None, None


gathered.register_autograd(_backward_of_gathered, setup_context=_keep_order)


ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, document_attention)
