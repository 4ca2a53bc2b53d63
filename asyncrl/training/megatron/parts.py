"""The tensors of Hugging Face names that a model of megatron-core holds, each in parts on some of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.megatron.table import NUMBERED, Family, Rule
from asyncrl.training.tensor_files import TensorFiles

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Place(NamedTuple):
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]  # of the whole
    stage: int  # that holds it
    rule: Rule
    parameter: nn.Parameter | None  # of this rank; None where another rank holds it
    expert_rank: int | None = None  # in its stage, which alone holds this expert


class Spread:
    """A tensor that is whole only where its parts are gathered. Every rank gathers."""

    def __init__(
        self, parts: Parts, place: Place, read: Callable[[nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> None:
        """
        Args:
            read: from a parameter of this rank to what is gathered of it, a tensor of its shape.
            dtype: of what is gathered.
        """
        self._parts, self._place, self._read, self._dtype = parts, place, read, dtype
        self.shape = place.shape

    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return torch.Size(self.shape).numel()

    def whole(self) -> torch.Tensor:
        """Gather it."""
        return self._parts.gathered(self._place, self._read, self._dtype)


class Parts:
    """The table of a family over the chunks of one rank's stage."""

    def __init__(
        self, chunks: Sequence[nn.Module], family: Family, shape: ModelConfig, layout: Layout, *, values: bool = False
    ) -> None:
        """
        Args:
            values: whether the head gives one number, and not the vocabulary.
        """
        self._shape, self._layout, self._values = shape, layout, values
        self._own = [dict(chunk.named_parameters()) for chunk in chunks]
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._peers = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        self.places = list(self._places(family))
        divided = {place.parameter: place.rule.split for place in self.places if place.rule.split is not None}
        for parameter, split in divided.items():
            if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
                # The library's initialisation, which is off, would mark them. Without the mark, the norm of the
                # gradient misses the parts of other ranks, in silence.
                set_tensor_model_parallel_attributes(parameter, True, split, 1)
        self.device = next(chunks[0].parameters()).device

    def _places(self, family: Family) -> Iterator[Place]:
        shapes, own = self._shape.tensors(), self._stage
        per_chunk, last = self._shape.layers // self._layout.chunks, self._layout.chunks - 1
        ends = {
            _EMBEDDING: (0, Rule("embedding.word_embeddings.weight", 0)),
            "model.norm.weight": (last, Rule("decoder.final_layernorm.weight")),
            _HEAD: (last, Rule("output_layer.weight", None if self._values else 0)),
        }
        if self._values:
            shapes[_HEAD] = 1, self._shape.hidden
        for name, size in shapes.items():
            if name in ends:
                index, rule = ends[name]
            else:
                number, _, rest = name.removeprefix("model.layers.").partition(".")
                index, local = divmod(int(number), per_chunk)
                rule = family.layer[NUMBERED.sub("N", rest)]
                rule = rule._replace(parameter=f"decoder.layers.{local}.{rule.parameter}")
            chunk, stage = divmod(index, self._layout.pipeline)
            found = self._own[chunk][rule.parameter] if stage == own else None
            yield self._expert(Place(name, size, stage, rule, found))

    def _expert(self, place: Place) -> Place:
        """Return the place of an expert's matrix on the rank that has it; any other as it is."""
        found, experts = NUMBERED.search(place.name), self._shape.experts
        if found is None or experts is None:
            return place
        rank, local = divmod(int(found[0]), experts.count // self._layout.expert)
        part = place.rule.part
        rule = place.rule._replace(part=lambda parameter, shape: part(parameter[local], shape))
        own = rank == parallel_state.get_expert_model_parallel_rank()
        return place._replace(rule=rule, parameter=place.parameter if own else None, expert_rank=rank)

    def spread(
        self,
        read: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[str, Spread]]:
        """Every tensor by its name, in the order of the model."""
        for place in self.places:
            yield place.name, Spread(self, place, read, dtype)

    def gathered(self, place: Place, read: Callable[[nn.Parameter], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Gather a tensor onto every rank of the replica."""
        found, split, peers = None, place.rule.split, self._layout.tensor
        if place.parameter is not None:
            own = place.rule.part(read(place.parameter).detach(), self._shape).to(dtype)
            found = own.reshape(self._local(place)).contiguous()
            if split is not None and peers > 1:
                every = [torch.empty_like(found) for _ in range(peers)]
                dist.all_gather(every, found, group=self._peers)
                found = torch.cat(every, split)
            found = found.narrow(0, 0, place.shape[0]).contiguous()  # without the rows of no token
        if self._layout.expert > 1 and place.expert_rank is not None and place.stage == self._stage:
            found = self._sent(found, place, place.expert_rank, self._experts, dtype)
        if self._layout.pipeline > 1:
            found = self._sent(found, place, place.stage, self._stages, dtype)
        assert found is not None
        return found

    def _sent(
        self, found: torch.Tensor | None, place: Place, rank: int, group: dist.ProcessGroup, dtype: torch.dtype
    ) -> torch.Tensor:
        """Give a tensor that one rank of a group has to all of them."""
        if found is None:
            found = torch.empty(place.shape, dtype=dtype, device=self.device)
        dist.broadcast(found, dist.get_global_rank(group, rank), group)
        return found

    def _local(self, place: Place) -> tuple[int, ...]:
        """Shape of a rank's part."""
        split, peers = place.rule.split, self._layout.tensor
        return tuple(-(-size // peers) if dim == split else size for dim, size in enumerate(place.shape))

    @torch.no_grad()
    def read(
        self,
        directory: Path,
        stem: str,
        prefix: str = "",
        into: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter,
        *,
        heads: bool = True,
    ) -> None:
        """Read this rank's part of every tensor, and no more.

        Args:
            stem: of the files.
            prefix: of the names in them.
            into: from a parameter of this rank to the tensor of its shape that is filled.
            heads: whether the head is read as well.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            OSError, SafetensorError: a file cannot be read.
        """
        with TensorFiles(directory, stem) as files:
            for place in self.places if heads else [place for place in self.places if place.name != _HEAD]:
                found = files.shape(prefix + place.name)
                if found != place.shape:
                    raise CheckpointError(
                        f"{directory}: {prefix}{place.name} has shape {found}, the model has {place.shape}; "
                        "a checkpoint continues only the model it was made from"
                    )
                if place.parameter is not None:
                    self._fill(place.rule.part(into(place.parameter), self._shape), place, files, prefix)
            tied = self._own[-1].get("output_layer.weight")
            if self._shape.tied and tied is not None:  # the last of several stages has a copy of the embedding
                place = next(place for place in self.places if place.name == _EMBEDDING)
                self._fill(into(tied), place, files, prefix)

    def _fill(self, part: torch.Tensor, place: Place, files: TensorFiles, prefix: str) -> None:
        local, split = self._local(place), place.rule.split
        start = self._rank * local[split] if split is not None else 0
        value = files.narrow(prefix + place.name, split or 0, start, start + local[split or 0])
        if value.shape == local:
            part.copy_(value.view(part.shape))
        else:  # of the vocabulary, whose last rank has rows of no token
            part.zero_()
            part[: len(value)].copy_(value)
