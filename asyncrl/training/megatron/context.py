"""Documents as the library hands them to our modules, with the share of a rank where ranks divide their tokens."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from asyncrl.training.attention import Documents
from asyncrl.training.context_parallel.allgather_attention import Segments
from asyncrl.training.context_parallel.exchange import together
from asyncrl.training.context_parallel.zigzag import part_of
from asyncrl.training.document_model import PaddedDocuments
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.packing import Inputs


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
    part = part_of(inputs._replace(documents=documents), math.lcm(2, layout.tensor))
    own = part.inputs
    packed = PackedDocuments(own.documents, own.documents.segments)
    columns = own.positions, own.targets, own.temperatures
    return Share(own.tokens, packed, *columns, part.scored, part.whole, part.sources)


def of_all_ranks(own: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the values of all scored tokens, [N, ...], from those of this rank, [M, ...]."""
    if share.scored is None:
        return own
    return together(own, share.scored, share.whole)
