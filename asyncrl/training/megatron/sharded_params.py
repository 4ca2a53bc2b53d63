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
from asyncrl.training.checkpoint import OtherModel
from asyncrl.training.lora import Lora
from asyncrl.training.megatron.lora_rows import adapted_rows
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.weight_map import EMBEDDING, HEAD, NUMBERED, Family, Row, Rule
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


class Reading(NamedTuple):
    """A selection of parameters to gather."""

    read: Read = _itself  # from a parameter of this rank
    dtype: torch.dtype = torch.float32
    summed: bool = False  # over the replicas, each of which has a share of it and zeros else


class Once:
    """A moment or sum, made once for the tensors that follow one another in one parameter, as those of experts do."""

    def __init__(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._place = place
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._known is None or self._known[0] is not parameter:
            self._known = parameter, self._place(parameter)
        return self._known[1]


_AS_IT_IS = Reading()


class _Peers(NamedTuple):
    """The ranks that a tensor is divided over."""

    rank: int  # of this one
    size: int
    group: dist.ProcessGroup


class Spread:
    """A tensor whose parts some ranks have. See `asyncrl.training.host_copy.Gathered`."""

    def __init__(self, parts: Parts, place: Place, reading: Reading) -> None:
        self._parts, self._place, self._reading = parts, place, reading
        self.shape, self.dtype, self.holders = place.shape, reading.dtype, parts.holders(place)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def whole(self, to: int) -> torch.Tensor | None:
        """Gather it on a rank that holds it."""
        return self._parts.gathered(self._place, self._reading, to)


class Parts:
    """The table of a family over the chunks of one rank's stage."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        family: Family,
        shape: ModelConfig,
        layout: Layout,
        *,
        values: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """
        Args:
            values: whether the head gives one number, and not the vocabulary.
            lora: adapters that the chunks have.
        """
        self._shape, self._layout, self._values = shape, layout, values
        self._own: list[dict[str, torch.Tensor]] = [
            {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())} for chunk in chunks
        ]
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        state = parallel_state
        own, of_experts = state.get_tensor_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
        self._peers = (  # of an expert the second, of all experts together the third
            _Peers(own, layout.tensor, state.get_tensor_model_parallel_group()),
            _Peers(of_experts, layout.expert_tensor, state.get_expert_tensor_parallel_group()),
            _Peers(state.get_expert_model_parallel_rank(), layout.expert, state.get_expert_model_parallel_group()),
        )
        self._replicas = (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_group(),
        )
        rows = family.rows(shape)
        rows = rows if lora is None else adapted_rows(rows, shape, lora.targets, lora.rank)
        self.places = list(self._places(rows))
        dense = (place for place in self.places if place.expert_rank is None)  # experts mark themselves
        divided = {place.parameter: place.rule.split for place in dense if place.rule.split is not None}
        for parameter, split in divided.items():
            if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
                # The library's initialisation, which is off, would mark them. Without the mark, the norm of the
                # gradient misses the parts of other ranks, in silence.
                set_tensor_model_parallel_attributes(parameter, True, split, 1)
        self.device = next(chunks[0].parameters()).device

    def _places(self, rows: Iterator[Row]) -> Iterator[Place]:
        for row in rows:
            rule, size = row.rule, row.size
            if self._values and row.name == HEAD:
                rule, size = rule._replace(split=None), (1, self._shape.hidden)
            index, local = self._layout.place_of(row.layer, self._shape.layers)
            if row.inside:
                rule = rule._replace(parameter=f"decoder.layers.{local}.{rule.parameter}")
            chunk, stage = divmod(index, self._layout.pipeline)
            found = self._own[chunk][rule.parameter] if stage == self._stage else None
            yield self._expert(Place(row.name, size, stage, rule, found, ahead=row.ahead))

    def _expert(self, place: Place) -> Place:
        """Return the place of an expert's matrix on its rank; other places unchanged."""
        found, experts = NUMBERED.search(place.name), self._shape.experts
        if found is None or experts is None:
            return place
        rank, local = divmod(int(found[0]), experts.count // self._layout.expert)
        part = place.rule.part
        rule = place.rule._replace(part=lambda parameter, shape: part(parameter[local], shape))
        own = rank == parallel_state.get_expert_model_parallel_rank()
        return place._replace(rule=rule, parameter=place.parameter if own else None, expert_rank=rank)

    def spread(self, reading: Reading = _AS_IT_IS) -> Iterator[tuple[str, Spread]]:
        """Every tensor by name, in the order of the model; buffers are read directly."""
        for place in self.places:
            yield place.name, self.gathering(place, reading if place.rule.trained else _AS_IT_IS)

    def gathering(self, place: Place, reading: Reading = _AS_IT_IS) -> Spread:
        """Return what belongs to a tensor, to be gathered."""
        return Spread(self, place, reading)

    def share(self, place: Place, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor, which its number of peers divides."""
        peers, split = self._peers_of(place), place.rule.split
        return whole if split is None else whole.chunk(peers.size, split)[peers.rank].contiguous()

    def trained(self, reading: Reading) -> Iterator[tuple[str, Spread]]:
        """Yield what belongs to every tensor that is trained."""
        for place in filter(is_trained, self.places):
            yield place.name, Spread(self, place, reading)

    def holders(self, place: Place) -> Sequence[int]:
        """Return the ranks that have any of a tensor."""
        return self._layout.holders(place.stage, dist.get_world_size(), place.expert_rank)

    def gathered(self, place: Place, reading: Reading, to: int) -> torch.Tensor | None:
        """Gather a tensor on a rank that holds it; ranks without it, or with a second copy, do not take part."""
        if place.parameter is None:
            return None
        rank, peers, split = dist.get_rank(), self._peers_of(place), place.rule.split
        divided = split is not None and peers.size > 1
        # Whose replica the one that gathers is: of a divided tensor its rank with the same part.
        own = to // peers.size * peers.size + peers.rank if divided else to
        replicas = self._replicas[place.expert_rank is not None or place.rule.stacks]
        sums = reading.summed and dist.get_world_size(replicas) > 1 and own in dist.get_process_group_ranks(replicas)
        if rank != own and not sums:
            return None
        read = place.rule.part(reading.read(place.parameter).detach(), self._shape).to(reading.dtype)
        found = read.reshape(self._local(place)).contiguous()
        if sums:
            dist.reduce(found, own, group=replicas)
        if rank != own:
            return None
        if divided:
            every = [torch.empty_like(found) for _ in range(peers.size)] if rank == to else None
            dist.gather(found, every, dst=to, group=peers.group)
            if every is None:
                return None
            found = _joined(every, split or 0, self._own_sections(place))
        return found.narrow(0, 0, place.shape[0]).contiguous()  # without the rows of no token

    def _peers_of(self, place: Place) -> _Peers:
        return self._peers[2 if place.rule.stacks else place.expert_rank is not None]

    def _local(self, place: Place) -> tuple[int, ...]:
        """Shape of a rank's part."""
        split, peers = place.rule.split, self._peers_of(place).size
        return tuple(-(-size // peers) if dim == split else size for dim, size in enumerate(place.shape))

    def _sections(self, place: Place) -> tuple[int, ...]:
        """Lengths of what a tensor consists of, along the divided dimension."""
        sections = place.rule.sections
        return (place.shape[place.rule.split or 0],) if sections is None else sections(self._shape)

    def _own_sections(self, place: Place) -> list[int]:
        """Return the same of a rank's part."""
        peers = self._peers_of(place).size if place.rule.split is not None else 1
        return [-(-length // peers) for length in self._sections(place)]

    @torch.no_grad()
    def read(
        self,
        directory: Path,
        stem: str,
        name: str = "{}",
        into: Read = _itself,
        *,
        wanted: Callable[[Place], bool] = bool,
    ) -> None:
        """Read this rank's part of every tensor, and no more. What the files lack of adapters stays.

        Args:
            stem: of the files.
            name: in them, with `{}` for that of the tensor.
            into: from a parameter of this rank to the tensor of its shape that is filled.
            wanted: selects tensors; otherwise all are read.

        Raises:
            OtherModel: a tensor has another shape.
            CheckpointError: one is missing.
            OSError, SafetensorError: a file cannot be read.
        """
        with TensorFiles(directory, stem) as files:
            for place in filter(wanted, self.places):
                if (place.ahead or place.rule.adapter) and name.format(place.name) not in files.names:
                    continue  # a checkpoint of a trainer that does not train this layer: keep the model's
                found = files.shape(name.format(place.name))
                if found != place.shape:
                    raise OtherModel(
                        f"{directory}: {name.format(place.name)} has shape {found}, the model has {place.shape}; "
                        "a checkpoint continues only the model it was made from"
                    )
                if place.parameter is not None:
                    self._fill(place.rule.part(into(place.parameter), self._shape), place, files, name)
            tied = self._own[-1].get("output_layer.weight")
            if self._shape.tied and tied is not None:  # the last of several stages has a copy of the embedding
                place = next(place for place in self.places if place.name == EMBEDDING)
                if wanted(place):
                    self._fill(into(tied), place, files, name)

    @torch.no_grad()
    def first_other(self, directory: Path, stem: str) -> str:
        """Return the name of a frozen tensor of this rank that differs from a model's; empty if there are none."""
        with TensorFiles(directory, stem) as files:
            for place in self.places:
                if place.rule.frozen and place.parameter is not None:
                    own = place.rule.part(place.parameter, self._shape)
                    found = torch.zeros_like(own)
                    self._fill(found, place, files, "{}")
                    if not torch.equal(found, own):
                        return place.name
        return ""

    def _fill(self, part: torch.Tensor, place: Place, files: TensorFiles, named: str) -> None:
        local, split, name = self._local(place), place.rule.split or 0, named.format(place.name)
        rank = self._peers_of(place).rank if place.rule.split is not None else 0
        found, start = [], 0
        for whole, own in zip(self._sections(place), self._own_sections(place), strict=True):
            found.append(files.narrow(name, split, start + rank * own, start + (rank + 1) * own))
            start += whole
        value = torch.cat(found, split) if len(found) > 1 else found[0]
        if value.shape == local:
            part.copy_(value.view(part.shape))
        else:  # of the vocabulary, whose last rank has rows of no token
            part.zero_()
            part[: len(value)].copy_(value)


def is_no_head(place: Place) -> bool:
    """Return whether a tensor does not belong to the head."""
    return place.name != HEAD


def is_trained(place: Place) -> bool:
    """Return whether a tensor is trained."""
    return place.rule.trained and not place.rule.frozen


def is_of_adapter(place: Place) -> bool:
    """Return whether a tensor is one of an adapter."""
    return place.rule.adapter


def _joined(parts: list[torch.Tensor], split: int, sections: list[int]) -> torch.Tensor:
    """Put the parts of tensor-parallel ranks together, section by section."""
    by_section = zip(*(torch.split(part, sections, split) for part in parts), strict=True)
    return torch.cat([one for section in by_section for one in section], split)
