"""Context parallelism: ranks share the tokens of every document.

A document is filled up to 2 C chunks of one length, C the number of ranks. Rank r has the chunks r and 2 C - 1 - r, so
that all ranks attend to as many tokens; keys and values are gathered (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from asyncrl.training.attention import Documents, Runs
from asyncrl.training.document_model import PaddedDocuments
from asyncrl.training.megatron.cp_allgather_attention import Segments
from asyncrl.training.megatron.cp_ring_attention import chunks_on
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.packing import Inputs, put


class PackedDocuments(PackedSeqParams):  # type: ignore[misc]
    """Documents as the library hands them to our own modules. The library has no format for documents: given bounds
    alone, it would rotate queries and keys document by document and wait for the GPU in every layer.
    """

    def __init__(self, documents: Documents, segments: Segments | None = None) -> None:
        super().__init__()
        self.documents = documents
        self.segments = segments
        self.recorded: torch.Tensor | None = None  # [T of this rank, layers, K] experts, for a replay
        self.counted: torch.Tensor | None = None  # [T of this rank, 1] 1 for tokens whose experts are counted

    @cached_property
    def padded(self) -> PaddedDocuments:
        """Return the documents as rows."""
        return PaddedDocuments.of(self.documents)

    @property
    def positions(self) -> torch.Tensor:
        """Places of the tokens of this context-parallel rank in their documents, [T]."""
        return self.documents.positions[0]


class Share(NamedTuple):
    """A micro-batch as one rank has it: T tokens, after M of which a token is scored."""

    tokens: torch.Tensor  # [1, T]
    packed: PackedDocuments
    positions: torch.Tensor  # [M] indices into T
    targets: torch.Tensor  # [M]
    temperatures: torch.Tensor  # [M]
    scored: torch.Tensor | None = None  # [M] places among those of all ranks; None where this rank has them all
    whole: int = 0  # number of them on all ranks
    # [T] places of the tokens among those of all ranks; -1 of none; None as `scored`
    sources: torch.Tensor | None = None


def share_of(inputs: Inputs, documents: Documents, layout: Layout) -> Share:
    """Return the share of this rank; sequence parallelism divides its tokens further, so they are filled up."""
    if layout.context == 1:
        rest = -inputs.tokens.shape[1] % layout.tensor
        if rest:
            bounds = torch.cat([documents.bounds, documents.bounds[-1:] + rest])
            positions = torch.nn.functional.pad(documents.positions, (0, rest))
            groups = (*documents.groups, (1, rest))
            documents = documents._replace(bounds=bounds, positions=positions, groups=groups, alike=0)
            if documents.routing is not None:
                routing = torch.nn.functional.pad(documents.routing, (0, 0, 0, rest))
                documents = documents._replace(routing=routing)
        tokens = torch.nn.functional.pad(inputs.tokens, (0, rest))
        return Share(tokens, PackedDocuments(documents), inputs.positions, inputs.targets, inputs.temperatures)
    lengths = np.concatenate([np.full(count, length) for count, length in documents.groups])
    chunks = 2 * layout.context
    filled = -(-lengths // chunks) * chunks
    rest = -filled.sum() % (math.lcm(2, layout.tensor) * layout.context)
    zigzag = _Zigzag(np.append(lengths, 0), np.append(filled, rest), layout.context)
    return zigzag.share(inputs, documents)


class _Zigzag:
    """The places of the tokens of D documents on C ranks."""

    def __init__(self, lengths: np.ndarray[Any, Any], filled: np.ndarray[Any, Any], ranks: int) -> None:
        """
        Args:
            lengths: [D] of the documents.
            filled: [D] the same, filled up.
        """
        self._lengths, self._filled, self._ranks = lengths, filled, ranks
        self._rank = parallel_state.get_context_parallel_rank()
        self._chunk = filled // (2 * ranks)
        self._starts = np.cumsum(2 * self._chunk) - 2 * self._chunk  # of each document on a rank
        self._held = int(2 * self._chunk.sum())  # tokens of a rank

    def share(self, inputs: Inputs, documents: Documents) -> Share:
        """Return what this rank has."""
        device = inputs.tokens.device
        document = np.repeat(np.arange(len(self._filled)), 2 * self._chunk)
        local = np.arange(self._held) - self._starts[document]
        chunk = self._chunk[document]
        second = (2 * self._ranks - 1 - self._rank) * chunk + local - chunk
        place = np.where(local < chunk, self._rank * chunk + local, second)
        there = place < self._lengths[document]
        source = np.where(there, (np.cumsum(self._lengths) - self._lengths)[document] + place, -1)
        own = np.full(inputs.tokens.shape[1], -1)
        own[source[there]] = np.flatnonzero(there)
        sources = put(source, device)
        alike = documents.alike if self._filled[-1] == 0 and chunks_on(device) else 0
        segments = self._segments(device)._replace(alike=alike)
        held = documents._replace(
            bounds=put(np.cumsum([0, *self._filled], dtype=np.int32), device),
            positions=put(place[None], device),
            groups=tuple((1, int(length)) for length in self._filled if length),
            alike=0,
        )
        if held.routing is not None:
            held = held._replace(routing=torch.where((sources >= 0)[:, None], held.routing[sources], 0))
        tokens = torch.where(sources >= 0, inputs.tokens[0, sources], 0)
        of_rank = put(own, device)[inputs.positions]
        scored = torch.nonzero(of_rank >= 0).squeeze(1)  # waits for the GPU, which by now has nothing to wait for
        return Share(
            tokens[None],
            PackedDocuments(held, segments),
            of_rank[scored],
            inputs.targets[scored],
            inputs.temperatures[scored],
            scored,
            len(inputs.positions),
            sources,
        )

    def _segments(self, device: torch.device) -> Segments:
        keys, queries, seen = [], [], []
        for start, chunk in zip(self._starts, self._chunk, strict=True):
            if not chunk:
                continue
            place = np.arange(2 * self._ranks * chunk)
            number = place // chunk
            late = number >= self._ranks
            rank = np.where(late, 2 * self._ranks - 1 - number, number)
            among = rank * self._held + start + place % chunk + late * chunk
            for own in (self._rank, 2 * self._ranks - 1 - self._rank):
                keys.append(among[: (own + 1) * chunk])
                queries.append(int(chunk))
                seen.append(len(keys[-1]))
        count = sum(seen)
        uses, run = np.full((2, self._ranks * self._held), count), np.repeat(np.arange(len(seen)), seen)
        uses[run % 2, np.concatenate(keys)] = np.arange(count)
        runs = _runs(queries, device), _runs(seen, device)
        return Segments(put(np.concatenate(keys), device), put(uses, device), tuple(queries), tuple(seen), runs)


def _runs(lengths: list[int], device: torch.device) -> Runs:
    longest = 1 << (max(lengths) - 1).bit_length()  # as of `Documents`
    return Runs(put(np.cumsum([0, *lengths], dtype=np.int32), device), longest)


def of_all_ranks(own: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the values of all scored tokens, [N, ...], from those of this rank, [M, ...]."""
    if share.scored is None:
        return own
    apply: Callable[..., torch.Tensor] = _Together.apply
    return apply(own, share.scored, share.whole)


class _Together(torch.autograd.Function):
    """Every rank computes the whole loss, so the gradient of its values is complete."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        found = own.new_zeros(count, *own.shape[1:])
        found[places] = own
        dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None
