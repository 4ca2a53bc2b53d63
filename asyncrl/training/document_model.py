"""A transformers model over a sequence of documents: packed, with some layers once per document, or padded.

Layers that carry a state from token to token (gated delta nets, Mamba, short convolutions) see each document as a row
of a batch, so state and convolution begin again. Rows are padded at the end, which earlier tokens never see.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.training.attention import DOCUMENTS, Documents
from asyncrl.training.delta_nets import Kernels, has_kernels, packed_forward
from asyncrl.training.head import decoder_of

_FULL = 0.75  # least share of the longest document of a padded batch that each other one has


class Arrangement(NamedTuple):
    """The way in which a model takes documents: see `asyncrl.training.document_check`."""

    packs: bool = True  # documents follow one another in one row; else each is a padded row
    apart: frozenset[str] = frozenset()  # classes of the layers that run once per document in a packed row
    shares: bool = True  # first tokens that documents have in common may be computed once
    reason: str = ""  # the layer kind that cannot pack
    undivided: str = ""  # the layer kind that sees tokens of other ranks, and not by full attention


def undivided(kind: str, directory: Path) -> str:
    """Return why ranks cannot share the tokens of a model that has a kind of layer."""
    return f"ranks share the tokens of full attention alone, and {directory} has {kind}; set learner.layout.context = 1"


class PaddedDocuments(NamedTuple):
    """The documents of a sequence of T tokens as rows, padded at the end."""

    batches: list[torch.Tensor]  # [B, L] places in T; padding repeats the last place of its document
    order: torch.Tensor  # [T] place of each token in the batches, laid end to end

    @classmethod
    def of(cls, documents: Documents) -> PaddedDocuments:
        """Put documents of similar length into one batch."""
        lengths = torch.tensor([length for count, length in documents.groups for _ in range(count)])
        starts = lengths.cumsum(0) - lengths
        device, order = documents.positions.device, torch.empty(int(lengths.sum()), dtype=torch.int64)
        batches, begun = [], 0
        for chosen in _similar(lengths):
            longest = int(lengths[chosen].max())
            within = torch.arange(longest)[None].minimum(lengths[chosen, None] - 1)
            places = starts[chosen, None] + within
            real = torch.arange(longest)[None] < lengths[chosen, None]
            order[places[real]] = begun + real.flatten().nonzero()[:, 0]
            begun += places.numel()
            batches.append(places.to(device))
        return cls(batches, order.to(device))

    def joined(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Return [1, T, ...] of the batches' outputs, [B, L, ...] each."""
        return torch.cat([one.flatten(0, 1) for one in outputs]).index_select(0, self.order)[None]


def _similar(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of documents, those of similar length together."""
    found: list[list[int]] = []
    for number in lengths.argsort(descending=True, stable=True).tolist():
        if not found or lengths[number] < _FULL * lengths[found[-1][0]]:
            found.append([])
        found[-1].append(number)
    return [torch.tensor(numbers) for numbers in found]


class DocumentModel:
    """The layers of a transformers model as a function of documents."""

    def __init__(self, model: Any, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self._model = model
        self._padded: PaddedDocuments | None = None  # of the newest pass, which a backward pass may compute again
        own = "sdpa" if model._supports_sdpa else "eager"
        model.set_attn_implementation(DOCUMENTS if arrangement.packs else own)
        self._modules = [one for one in model.modules() if type(one).__name__ in arrangement.apart]
        self._replaced = list(self._modules)  # modules with another forward pass
        for module in self._modules:
            module.forward = partial(self._once_per_document, module.forward)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute gated delta nets on the packed row, on a GPU in 16 bits."""
        for module in filter(has_kernels, self._modules):
            module.forward = partial(packed_forward, module, kernels)
        self._modules = [one for one in self._modules if not has_kernels(one)]

    def release(self) -> None:
        """Let all layers see the whole row again."""
        for module in self._replaced:
            del module.forward

    def hidden(self, tokens: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Compute the last hidden states, [1, T, H], of tokens [1, T]."""
        base, packs = decoder_of(self._model), self.arrangement.packs
        self._padded = None if packs and not self._modules else PaddedDocuments.of(documents)
        if packs:
            options = {"documents": documents._replace(routing=None), "position_ids": documents.positions}
            found: torch.Tensor = base(input_ids=tokens, use_cache=False, **options).last_hidden_state
            return found
        assert self._padded is not None
        rows = [tokens[0][places] for places in self._padded.batches]
        return self._padded.joined([base(input_ids=one, use_cache=False).last_hidden_state for one in rows])

    def leave_uncompiled(self) -> None:
        """Keep compiled layers from compiling the parts that run once per document: each batch has other documents."""
        disable: Any = torch.compiler.disable  # its call has no types
        for module in self._modules:
            module.forward = disable(module.forward)

    def _once_per_document(self, forward: Any, *arguments: Any, **options: Any) -> Any:
        padded, length = self._padded, self._length(arguments, options)
        if padded is None or length != len(padded.order):
            return forward(*arguments, **options)
        options.pop("documents", None)
        outputs = [
            forward(*_rows(arguments, places, length), **_rows(options, places, length)) for places in padded.batches
        ]
        if isinstance(outputs[0], torch.Tensor):
            return padded.joined(outputs)
        return (padded.joined([one[0] for one in outputs]), *(None for _ in outputs[0][1:]))

    def _length(self, arguments: Any, options: Any) -> int:
        given = chain(arguments, options.values())
        return next(one.shape[1] for one in given if isinstance(one, torch.Tensor) and one.ndim == 3)


def _rows(value: Any, places: torch.Tensor, length: int) -> Any:
    """Return the documents of each tensor [1, T, ...] as rows [B, L, ...]."""
    if isinstance(value, torch.Tensor):
        whole = value.ndim > 1 and value.shape[:2] == (1, length)
        return value[0][places] if whole else value
    if isinstance(value, dict):
        return {name: _rows(one, places, length) for name, one in value.items()}
    return tuple(_rows(one, places, length) for one in value) if isinstance(value, tuple) else value
