"""The tensors of Hugging Face names that a model of megatron-core holds, each in parts on some of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.megatron.table import EMBEDDING, HEAD, NUMBERED, Family, Rule
from asyncrl.training.tensor_files import TensorFiles

Read: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From a parameter of this rank to a tensor of its shape."""


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


class Place(NamedTuple):
    """Place of a tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole
    stage: int  # that holds it
    rule: Rule
    parameter: torch.Tensor | None  # of this rank; None where another rank holds it
    expert_rank: int | None = None  # in its stage, which alone holds this expert
    ahead: bool = False  # of the layer that predicts the token after the next one


class Spread:
    """A tensor that is whole only where its parts are gathered. Every rank gathers."""

    def __init__(self, parts: Parts, place: Place, read: Read, dtype: torch.dtype) -> None:
        """
        Args:
            read: from a parameter of this rank to what is gathered of it, a tensor of its shape.
            dtype: of what is gathered.
        """
        self._parts, self._place, self._read = parts, place, read
        self.shape, self.dtype = place.shape, dtype

    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return torch.Size(self.shape).numel()

    def whole(self) -> torch.Tensor:
        """Gather it."""
        return self._parts.gathered(self._place, self._read, self.dtype)


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
        self._own: list[dict[str, torch.Tensor]] = [
            {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())} for chunk in chunks
        ]
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
        for name, rule, size, layer, inside, ahead in family.rows(self._shape):
            if self._values and name == HEAD:
                rule, size = rule._replace(split=None), (1, self._shape.hidden)  # noqa: PLW2901
            index, local = self._layout.place_of(layer, self._shape.layers)
            if inside:
                rule = rule._replace(parameter=f"decoder.layers.{local}.{rule.parameter}")  # noqa: PLW2901
            chunk, stage = divmod(index, self._layout.pipeline)
            found = self._own[chunk][rule.parameter] if stage == self._stage else None
            yield self._expert(Place(name, size, stage, rule, found, ahead=ahead))

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

    def spread(self, read: Read = _itself, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Spread]]:
        """Every tensor by its name, in the order of the model; buffers are read as they are."""
        for place in self.places:
            trained = place.rule.trained
            yield place.name, Spread(self, place, read if trained else _itself, dtype if trained else torch.float32)

    def trained(self, read: Read) -> Iterator[tuple[str, Spread]]:
        """Yield what belongs to every tensor that is trained, in float32."""
        for place in self.places:
            if place.rule.trained:
                yield place.name, Spread(self, place, read, torch.float32)

    def gathered(self, place: Place, read: Read, dtype: torch.dtype) -> torch.Tensor:
        """Gather a tensor onto every rank of the replica."""
        found, split, peers = None, place.rule.split, self._layout.tensor
        if place.parameter is not None:
            own = place.rule.part(read(place.parameter).detach(), self._shape).to(dtype)
            found = own.reshape(self._local(place)).contiguous()
            if split is not None and peers > 1:
                every = [torch.empty_like(found) for _ in range(peers)]
                dist.all_gather(every, found, group=self._peers)
                found = _joined(every, split, place.rule.stacked)
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
        into: Read = _itself,
        *,
        wanted: Callable[[Place], bool] = bool,
    ) -> None:
        """Read this rank's part of every tensor, and no more.

        Args:
            stem: of the files.
            prefix: of the names in them.
            into: from a parameter of this rank to the tensor of its shape that is filled.
            wanted: says what is read; else all is.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            OSError, SafetensorError: a file cannot be read.
        """
        with TensorFiles(directory, stem) as files:
            for place in filter(wanted, self.places):
                if place.ahead and prefix + place.name not in files.names:
                    continue  # a checkpoint of a trainer that does not train it: it begins as it is
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
                place = next(place for place in self.places if place.name == EMBEDDING)
                self._fill(into(tied), place, files, prefix)

    def _fill(self, part: torch.Tensor, place: Place, files: TensorFiles, prefix: str) -> None:
        local, split, stacked = self._local(place), place.rule.split or 0, place.rule.stacked
        rows, whole = local[split] // stacked, place.shape[split] // stacked
        start = self._rank * rows if place.rule.split is not None else 0
        name = prefix + place.name
        begins = [number * whole + start for number in range(stacked)]
        found = [files.narrow(name, split, begin, begin + rows) for begin in begins]
        value = torch.cat(found) if stacked > 1 else found[0]
        if value.shape == local:
            part.copy_(value.view(part.shape))
        else:  # of the vocabulary, whose last rank has rows of no token
            part.zero_()
            part[: len(value)].copy_(value)


def is_no_head(place: Place) -> bool:
    """Return whether a tensor is none of the head."""
    return place.name != HEAD


def is_trained(place: Place) -> bool:
    """Return whether a tensor is trained."""
    return place.rule.trained


def _joined(parts: list[torch.Tensor], split: int, stacked: int) -> torch.Tensor:
    """Put the parts of tensor-parallel ranks together."""
    if stacked == 1:
        return torch.cat(parts, split)
    return torch.cat([part.view(stacked, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)
