"""Log-probabilities and entropies over a vocabulary, of which the logits of a chunk of tokens are held at a time.

The backward pass goes through the vocabulary in blocks instead: so each row of the head has its whole gradient from one
product, and no gradient of the head is read and written again for each chunk.

The outcomes of K ids are these ids, and one of all others; without the latter where the ids are the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncrl.training.head import bounded

CHUNK_ELEMENTS = 1 << 27
"""Logits held at once, forward and backward, for any number of tokens."""
_COMPILED = 1 << 29
"""The same where kernels are compiled, and memory need not be spared: the head is read once for each chunk."""
_TOKENS = 1 << 13  # of a block's logits, at most: its width must not depend on the micro-batch, for it is compiled
_EVEN = 128  # rows of the head, of which a block has a multiple: products of aligned matrices are faster

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
    """Gradient with respect to the logits, from those of log-probs, entropies H and outcomes P, if present.

    They are (1[target] - p) / temperature, -p (log p + H) / temperature, and for the outcome b of gradient g_b
    (p 1[in b] / P_b - p) g_b / temperature. The logits are those of some rows of the head that follow one another;
    targets and ids are counted from the first of these.
    """
    (targets, temperatures, *ids), (entropy, total, *outcomes), (of_logprob, of_entropy, of_outcome) = (
        tokens,
        outputs,
        grads,
    )
    logprobs = logits.float() / temperatures[:, None] - total[:, None]
    probabilities = logprobs.exp()
    if of_logprob is None:
        slope = torch.zeros_like(logprobs)
    else:
        chosen = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        slope = (chosen.float() - probabilities) * (of_logprob / temperatures)[:, None]
    if of_entropy is not None:
        slope = slope - probabilities * (logprobs + entropy[:, None]) * (of_entropy / temperatures)[:, None]
    if of_outcome is not None:
        of_outcome, width = of_outcome / temperatures[:, None], logits.shape[-1]
        slope = slope - probabilities * of_outcome.sum(-1, keepdim=True)
        count = ids[0].shape[-1]
        places = ids[0].where((ids[0] >= 0) & (ids[0] < width), width)  # another column, for ids of other rows
        if count < of_outcome.shape[-1]:
            rest = _with_another(logprobs - outcomes[0][:, count:]).scatter(-1, places, -torch.inf).exp()
            slope = slope + rest[:, :width] * of_outcome[:, count:]
        slope = _with_another(slope).scatter_add(-1, places, of_outcome[:, :count])[:, :width]
    return slope.to(logits.dtype)


def _with_another(columns: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(columns, (0, 1))


def _most_probable(logits: torch.Tensor, temperatures: torch.Tensor, number: int, vocabulary: int) -> torch.Tensor:
    logprobs = (logits.float() / temperatures[:, None]).log_softmax(-1)
    values, ids = logprobs[:, :vocabulary].topk(number)
    return torch.stack([ids.float(), values], -1)


class Kernels:
    """The two computations on logits, compiled if that pays off."""

    rows: int | None = None  # of the head that belong to tokens; None for all
    exact = False  # the head multiplies in float32

    def __init__(self, *, compiled: bool, chunk_elements: int = 0, bound: float = 0.0) -> None:
        """
        Args:
            bound: of the logits: see `asyncrl.training.head`.
        """
        self.bound = bound
        self.score: Callable[..., _Scored] = torch.compile(_score) if compiled else _score
        self.slope: Callable[..., torch.Tensor] = torch.compile(_slope, dynamic=True) if compiled else _slope
        self.most_probable: Callable[..., torch.Tensor] = _most_probable
        self.compiled = compiled
        self.chunk_elements = chunk_elements or (_COMPILED if compiled else CHUNK_ELEMENTS)

    def blocks(self, rows: int) -> tuple[list[slice], int]:
        """Return blocks of the head's rows, and how many tokens may have the logits of one at once."""
        rows = rows if self.rows is None else self.rows
        widest = max(self.chunk_elements // _TOKENS, 1)
        width = -(-rows // max(-(-rows // widest), 1))
        width = -(-width // _EVEN) * _EVEN if widest >= _EVEN else max(width, 1)
        blocks = [slice(start, min(start + width, rows)) for start in range(0, rows, width)]
        return blocks, max(self.chunk_elements // width, 1)


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
    return torch.cat([kernels.most_probable(_logits(part, weight, bias, kernels), heat, *top) for part, heat in parts])


class _ChosenLogProbs(torch.autograd.Function):
    """Keeps two numbers of each token in addition to its inputs; the backward pass computes the logits again."""

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
            kernels.score(_logits(part, weight, bias, kernels), *rest)
            for part, *rest in zip(*(torch.split(one, size) for one in (hidden, *tokens)), strict=True)
        ]
        logprobs, entropy, total, *outcomes = (torch.cat(column) for column in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, *tokens, entropy, total, *outcomes)
        ctx.kernels, ctx.inputs = kernels, len(tokens)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *outcomes

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, *columns = ctx.saved_tensors
        tokens, outputs = columns[: ctx.inputs], columns[ctx.inputs :]
        wants, (blocks, size) = ctx.needs_input_grad, ctx.kernels.blocks(weight.shape[0])
        # Parts are added in float32: their number must not show in the gradient.
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight) if wants[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and wants[2] else None
        for rows in blocks:
            own_weight, own_bias = weight[rows], None if bias is None else bias[rows]
            weights, biases = list[torch.Tensor](), list[torch.Tensor]()
            for start in range(0, max(len(hidden), 1), size):
                part = slice(start, start + size)
                targets, temperatures, *ids = (one[part] for one in tokens)
                given = (targets - rows.start, temperatures, *(one - rows.start for one in ids))
                upstream = [None if one is None else one[part] for one in [*grads, None][:3]]
                logits = _logits(hidden[part], own_weight, own_bias, ctx.kernels)
                if ctx.kernels.compiled:  # for the two widths of blocks, and any number of tokens
                    torch._dynamo.mark_static(logits, 1)
                slope = ctx.kernels.slope(logits, given, [one[part] for one in outputs], upstream)
                if bound := ctx.kernels.bound:
                    slope = slope * (1.0 - (logits / bound).square())
                of_hidden[part] += slope @ own_weight.to(slope)
                if of_weight is not None:
                    weights.append(slope.T @ hidden[part].to(slope))
                if of_bias is not None:
                    biases.append(slope.sum(0, dtype=torch.float32))
            if of_weight is not None:
                of_weight[rows] = _sum(weights)
            if of_bias is not None:
                of_bias[rows] = _sum(biases)
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> torch.Tensor:
    if kernels.exact:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    return bounded(torch.nn.functional.linear(hidden, weight, bias), kernels.bound)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add parts in float32; a single one has been added up so."""
    return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts]).sum(0)
