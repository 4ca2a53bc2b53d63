"""Attention of ranks that share the tokens of documents of one length, in two parts that are joined by their log-sums.

A chunk attends to itself while keys and values of all ranks are in transit, and then to all earlier chunks. The
gradient of each part follows from the joined result (arXiv 2310.01889, section 3). Neither part has a mask that begins
inside its keys, so torch's kernel for dense tensors takes both: on Hopper it is nearly twice as fast as the one for
runs of any length.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.training.context_parallel.exchange import count, gathered, place, summed


def chunks_on(device: torch.device) -> bool:
    """Return whether a device has the kernel."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def takes_chunks(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel takes these, [T, heads, D]."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return size == value.shape[-1] and (not query.is_cuda or (half and size % 8 == 0 and size <= 128))


def chunk_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int, *, scale: float | None
) -> torch.Tensor:
    """Compute the causal attention of this rank's queries: see `segments.segment_attention`.

    Args:
        documents: number of them, of each of which this rank has two chunks of one length.
    """
    found: torch.Tensor = _attended(query, key, value, documents, scale or query.shape[-1] ** -0.5)[0]
    return found


@torch.library.custom_op("asyncrl::chunks", mutates_args=())
def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return attention; its log-sums [documents, 2, heads, S], S the tokens of a chunk; and the keys and values of all
    ranks, [C, 2, T, key-value heads, D].
    """
    every, work = gathered(torch.stack((key, value)))
    queries, *own = (_chunks(one, documents) for one in (query, key, value))
    parts = _attend(*(one.flatten(0, 1) for one in (queries, *own)), scale=scale, causal=True)
    made, logs = (_cut(one, 0, documents, 2) for one in parts)
    work.wait()
    for half, blocks in enumerate(_before(every, documents)):
        if len(blocks[0]):
            other, further = _attend(queries[:, half], *_in_a_row(blocks), scale=scale, causal=False)
            share = torch.sigmoid(further - logs[:, half]).unsqueeze(-1)
            made[:, half].lerp_(other, share.to(other.dtype))  # rounded as the whole output
            logs[:, half] = torch.logaddexp(logs[:, half], further)
    return _flat(made), logs.contiguous(), every


@torch.library.custom_op("asyncrl::chunks_gradient", mutates_args=())
def _gradient(
    grad: torch.Tensor, given: list[torch.Tensor], found: list[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        grad: of the attention.
        given: queries, keys and values.
        found: what `_attended` returned.
    """
    (out, logs, every), documents = found, len(found[1])
    queries, keys, values, outs, grads = (_chunks(one, documents) for one in (*given, out, grad))
    others = torch.zeros_like(every)  # of keys and values of all ranks
    of_halves = {}
    for half, blocks in enumerate(_before(every, documents)):
        if len(blocks[0]):
            held = queries[:, half], *_in_a_row(blocks), outs[:, half], logs[:, half]
            of_halves[half], *of_seen = _attend_backward(grads[:, half], held, scale=scale, causal=False)
            _add(_before(others, documents)[half], of_seen)
    own, work = summed(others)
    held = queries, keys, values, outs, logs
    flat = [one.flatten(0, 1) for one in held]
    made = _attend_backward(grads.flatten(0, 1), flat, scale=scale, causal=True)
    of_queries, of_keys, of_values = (_cut(one, 0, documents, 2) for one in made)
    for half, of_half in of_halves.items():
        of_queries[:, half] += of_half
    work.wait()
    return _flat(of_queries), _flat(of_keys) + own[0], _flat(of_values) + own[1]


@_attended.register_fake
def _attended_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    logs = query.new_empty(documents, 2, heads, tokens // (2 * documents), dtype=torch.float32)
    ranks = count()
    return query.new_empty(query.shape), logs, key.new_empty(ranks, 2, *key.shape)


@_gradient.register_fake
def _gradient_shapes(
    grad: torch.Tensor, given: list[torch.Tensor], found: list[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (one.new_empty(one.shape) for one in given)
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *given, _, ctx.scale = inputs
    ctx.save_for_backward(*given, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    return *_gradient(grad, saved[:3], saved[3:], ctx.scale), None, None


_attended.register_autograd(_backward, setup_context=_keep)


def _cut(tensor: torch.Tensor, dimension: int, *sizes: int) -> torch.Tensor:
    found: torch.Tensor = tensor.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]
    return found


def _chunks(tokens: torch.Tensor, documents: int) -> torch.Tensor:
    """View [T, heads, D] as [documents, 2, heads, S, D]."""
    return _cut(tokens, 0, documents, 2, -1).transpose(2, 3)


def _flat(chunks: torch.Tensor) -> torch.Tensor:
    """Return what `_chunks` makes a view of, not divided."""
    return chunks.transpose(2, 3).flatten(0, 2).contiguous()


def _before(every: torch.Tensor, documents: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """View what comes before the first and the second chunk of this rank: blocks [N, 2, documents, S, heads, D].

    Their order is that of the ranks, not that of the tokens, which attention without a mask does not see.
    """
    rank, chunks = place(), _cut(every, 2, documents, 2, -1)
    first, second = chunks[:, :, :, 0], chunks[:, :, :, 1]
    return [first[:rank]], [first, second[rank + 1 :]]


def _in_a_row(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Return keys and values, [2, documents, heads, S of all, D]."""
    return torch.cat([one.permute(1, 2, 0, 3, 4, 5) for one in blocks], 2).flatten(2, 3).transpose(2, 3)


def _add(blocks: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Add to blocks the gradients of keys and values as `_in_a_row` returns these."""
    for number, one in enumerate(grads):
        parts = _cut(one, 2, sum(map(len, blocks)), -1).permute(2, 0, 3, 1, 4)
        for block, part in zip(blocks, torch.split(parts, list(map(len, blocks))), strict=True):
            block[:, number] += part


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, [B, heads, S, D] as the queries, and its log-sums, [B, heads, S]."""
    aten = torch.ops.aten
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    found, logs, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)
    return found, logs.squeeze(-1)


def _attend_backward(grad: torch.Tensor, held: Any, *, scale: float, causal: bool) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        grad: of the joined attention.
        held: queries, keys and values of a part; the joined attention and log-sums.
    """
    aten, (query, key, value, out, logs) = torch.ops.aten, held
    if not query.is_cuda:
        of_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return list(of_cpu(grad, query, key, value, out, logs, 0.0, causal, scale=scale))
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # state of dropout, which is off
    own = grad, query, key, value, out, logs.unsqueeze(-1).contiguous(), seed, seed
    lengths = None, None, None, query.shape[2], key.shape[2]  # no bias, no bounds of runs
    return list(aten._scaled_dot_product_cudnn_attention_backward(*own, *lengths, 0.0, causal, scale=scale))
