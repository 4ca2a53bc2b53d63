"""Log-probabilities and entropies over a vocabulary, of which the logits of a chunk of tokens are held at a time.

The outcomes of K ids are these ids, and one of all others; without the latter where the ids are the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

CHUNK_ELEMENTS = 1 << 27
"""Logits held at once, forward and backward, whatever the number of tokens."""
_COMPILED = 1 << 29
"""The same where kernels are compiled: the gradient of the head is read and written once for each chunk."""

_Scored: TypeAlias = tuple[torch.Tensor, ...]
_Columns: TypeAlias = Sequence[torch.Tensor]


def _score(logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *ids: torch.Tensor) -> _Scored:
    scaled = logits.float() / temperatures[:, None]
    total = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - total
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return logprobs, entropy, total, *(_outcomes(scaled, one) - total[:, None] for one in ids)


def _outcomes(scaled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Unnormalised log-probs of the outcomes of ids [C, K], [C, K + 1]."""
    named = scaled.gather(-1, ids)
    if ids.shape[-1] == scaled.shape[-1]:
        return named
    # From the logits: 1 minus the mass of the ids would lose all digits of a small rest, and its gradient.
    return torch.cat([named, scaled.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)], -1)


def _slope(
    logits: torch.Tensor, tokens: _Columns, outputs: _Columns, grads: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Gradient with respect to the logits, from those of log-probs, entropies H and outcomes P, where there are any.

    They are (1[target] - p) / temperature, -p (log p + H) / temperature, and for the outcome b of gradient g_b
    (p 1[in b] / P_b - p) g_b / temperature.
    """
    (targets, temperatures, *ids), (entropy, total, *outcomes), (of_logprob, of_entropy, of_outcome) = (
        tokens,
        outputs,
        grads,
    )
    logprobs = logits.float() / temperatures[:, None] - total[:, None]
    probabilities = logprobs.exp()
    slope = torch.zeros_like(logprobs)
    if of_logprob is not None:
        chosen = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        slope = (chosen.float() - probabilities) * (of_logprob / temperatures)[:, None]
    if of_entropy is not None:
        slope = slope - probabilities * (logprobs + entropy[:, None]) * (of_entropy / temperatures)[:, None]
    if of_outcome is not None:
        of_outcome = of_outcome / temperatures[:, None]
        slope = slope - probabilities * of_outcome.sum(-1, keepdim=True)
        count = ids[0].shape[-1]
        if count < of_outcome.shape[-1]:
            rest = (logprobs - outcomes[0][:, count:]).scatter(-1, ids[0], -torch.inf).exp()
            slope = slope + rest * of_outcome[:, count:]
        slope = slope.scatter_add(-1, ids[0], of_outcome[:, :count])
    return slope.to(logits.dtype)


def _most_probable(logits: torch.Tensor, temperatures: torch.Tensor, number: int, vocabulary: int) -> torch.Tensor:
    logprobs = (logits.float() / temperatures[:, None]).log_softmax(-1)
    values, ids = logprobs[:, :vocabulary].topk(number)
    return torch.stack([ids.float(), values], -1)


class Kernels:
    """The two computations on logits, compiled where they pay for it."""

    def __init__(self, *, compiled: bool, chunk_elements: int = 0) -> None:
        self.score: Callable[..., _Scored] = torch.compile(_score) if compiled else _score
        self.slope: Callable[..., torch.Tensor] = torch.compile(_slope) if compiled else _slope
        self.most_probable: Callable[..., torch.Tensor] = _most_probable
        self.chunk_elements = chunk_elements or (_COMPILED if compiled else CHUNK_ELEMENTS)


class Top(NamedTuple):
    """The most probable tokens that are asked for."""

    number: int  # of each position; at most `vocabulary`
    vocabulary: int  # only ids below it are meant, of a model that may have more


def chosen_logprobs(
    hidden: torch.Tensor,
    head: Any,
    columns: tuple[torch.Tensor, torch.Tensor],
    kernels: Kernels,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Score the targets of N tokens.

    Args:
        hidden: [N, H] last hidden states.
        head: the linear module from H to the vocabulary, with or without a bias.
        columns: targets [N], and temperatures [N].
        kernels: what computes it.
        ids: [N, K] distinct ids of each token.

    Returns:
        [N] log-probs in nats at the given temperatures, and [N] entropies in nats, both float32; with ids also
        [N, K + 1] log-probs of their outcomes.
    """
    weight, bias = head.weight, head.bias
    apply: Callable[..., tuple[torch.Tensor, ...]] = _ChosenLogProbs.apply
    return apply(hidden, weight, bias, columns if ids is None else (*columns, ids), kernels)


def most_probable(
    hidden: torch.Tensor, head: Any, temperatures: torch.Tensor, kernels: Kernels, top: Top
) -> torch.Tensor:
    """The most probable tokens of N positions, without gradient; see `chosen_logprobs`.

    Returns:
        [N, number, 2] float32: id, which is exact up to 2^24, and log-prob, in falling order.
    """
    weight, bias = head.weight, head.bias
    size = max(kernels.chunk_elements // weight.shape[0], 1)
    parts = zip(torch.split(hidden, size), torch.split(temperatures, size), strict=True)
    return torch.cat(
        [kernels.most_probable(torch.nn.functional.linear(part, weight, bias), heat, *top) for part, heat in parts]
    )


class _ChosenLogProbs(torch.autograd.Function):
    """Keeps two numbers of each token beside its inputs; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: tuple[torch.Tensor, ...],
        kernels: Kernels,
    ) -> tuple[torch.Tensor, ...]:
        size = max(kernels.chunk_elements // weight.shape[0], 1)
        scores = [
            kernels.score(torch.nn.functional.linear(part, weight, bias), *rest)
            for part, *rest in zip(*(torch.split(one, size) for one in (hidden, *tokens)), strict=True)
        ]
        logprobs, entropy, total, *outcomes = (torch.cat(column) for column in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, *tokens, entropy, total, *outcomes)
        ctx.kernels, ctx.size, ctx.inputs = kernels, size, len(tokens)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *outcomes

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, *columns = ctx.saved_tensors
        given = [*grads, None][:3]
        there = [one is not None for one in given]
        columns += [one for one in given if one is not None]
        wants = ctx.needs_input_grad
        # Chunks are added in float32: their number must not show in the gradient.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[2] else None
        of_hidden = []
        for part, *rest in zip(*(torch.split(one, ctx.size) for one in (hidden, *columns)), strict=True):
            logits = torch.nn.functional.linear(part, weight, bias)
            saved, ends = rest[: len(rest) - sum(there)], iter(rest[len(rest) - sum(there) :])
            parts = [next(ends) if one else None for one in there]
            slope = ctx.kernels.slope(logits, saved[: ctx.inputs], saved[ctx.inputs :], parts)
            of_hidden.append(slope @ weight)
            if of_weight is not None:
                of_weight += slope.T @ part
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=torch.float32)
        of_weight = of_weight.to(weight.dtype) if of_weight is not None else None
        of_bias = of_bias.to(bias.dtype) if of_bias is not None else None
        return torch.cat(of_hidden), of_weight, of_bias, None, None
