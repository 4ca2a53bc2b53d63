"""Tensors copied to host memory that is kept from one copy to the next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from asyncrl.data.quantisation import Form
from asyncrl.training.cpu_offload import storage_key
from asyncrl.training.host_memory import host_memory
from asyncrl.training.lora import Adapter
from asyncrl.training.masters import joined
from asyncrl.weights.quantised import Stored, quantise, stored_as
from asyncrl.weights.rank_shards import Sized, owners
from asyncrl.weights.shared import View, in_calls, keep_for_reader, pack_tensors, shared_memory
from asyncrl.weights.tensors import Files, HostTensor, stem_of_share

_ALIGNED = 64  # bytes
_UNDER_WAY_BYTES = 256 << 20  # queued copies at once: copies of a step to the device wait for these


@runtime_checkable
class Gathered(Protocol):
    """A tensor that is whole on no rank, or on some alone."""

    shape: tuple[int, ...]
    holders: Sequence[int]  # ranks that have any of it

    def numel(self) -> int:
        """Return its number of elements."""

    def whole(self, to: int) -> torch.Tensor | None:
        """Return it on one of the ranks that hold it, and nothing on others; every rank calls it."""


class Source(NamedTuple):
    """A tensor that is to be copied."""

    stem: str  # of the file that will hold it
    name: str
    tensor: torch.Tensor | Gathered
    dtype: torch.dtype  # of the copy
    # Added on the way: a sum made before would take the memory of all, and be freed while the copy still reads it.
    adapter: Adapter | None = None
    rest: torch.Tensor | None = None  # of a rounded tensor: what makes it exact again (`asyncrl.training.masters`)
    form: Form | None = None  # in which it is quantised on the way, by the rank that keeps it

    @property
    def stored(self) -> list[Stored]:
        """Tensors that the copy consists of."""
        shape = tuple(self.tensor.shape)
        return [Stored(self.name, self.dtype, shape)] if self.form is None else stored_as(self.form, self.name, shape)

    @property
    def as_it_is(self) -> torch.Tensor | None:
        """The tensor, where the copy has all bits of its storage and no others."""
        tensor, changes = self.tensor, (self.adapter, self.rest, self.form)
        if (
            not isinstance(tensor, torch.Tensor)
            or isinstance(tensor, DTensor)
            or any(one is not None for one in changes)
        ):
            return None
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole and tensor.numel() and tensor.dtype == self.dtype else None


class _Place(NamedTuple):
    """The memory of one copy, tensor by tensor."""

    to: int  # rank that keeps it
    host: Sequence[torch.Tensor] = ()  # where this rank keeps it
    shared: Sequence[torch.Tensor] = ()  # on the GPU, where other processes may read it: it is filled first


class HostCopy:
    """Copies of tensors in host memory: page-locked and on a separate stream if they come from a GPU.

    The copies of one `begin` are there until the next one. Each rank keeps the tensors that it writes (`owners`).
    Sharded ones are gathered one at a time by the rank that keeps it, one of those that hold it, which has the whole of
    that one on its device.
    """

    def __init__(
        self, device: torch.device, *, rank: int = 0, ranks: int = 1, shares: bool = False, whole: Collection[str] = ()
    ) -> None:
        """
        Args:
            rank: number of this one among its peers.
            ranks: how many there are.
            shares: whether other processes of the host may read what this rank keeps: from a GPU out of copies that
                stay there.
            whole: see `owners`.
        """
        self._rank, self._ranks = rank, ranks
        self._whole = whole
        self._sized: list[Sized] = []  # tensors of the newest copy
        self._owners: list[int] = []  # ranks that write them
        self._shares = shares
        self._device = device
        cuda: Any = torch.cuda if device.type == "cuda" else None
        self._stream = cuda.Stream(device) if cuda else None
        self._done: Any = cuda.Event() if cuda else None
        # The device's queue holds about a thousand copies; a longer queue would block the caller.
        self._pool = ThreadPoolExecutor(1, "copies") if cuda else None
        self._copying: Future[None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # in host memory
        self._shared: torch.Tensor | None = None  # that other processes map
        self._views: list[View] = []
        self._packed: list[bytes] = []
        self._files: dict[str, list[HostTensor]] = {}
        self._unchanged: dict[int, torch.Tensor] = {}

    def begin(self, sources: Sequence[Source]) -> None:
        """Copy tensors, or on a GPU start to; a caller that changes the tensors calls `order` before."""
        places = self._place(sources)
        self._unchanged = {}
        for source, place in zip(sources, places, strict=True):
            if (own := source.as_it_is) is not None and place.host:
                self._unchanged[storage_key(own)] = place.host[0]
        if self._stream is None or self._pool is None:
            for source, place in zip(sources, places, strict=True):
                _copy(source, place)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        if any(_is_sharded(source.tensor) for source in sources):
            self._issue(sources, places)  # collectives keep their order in one thread
        else:
            self._copying = self._pool.submit(self._issue, sources, places)

    def unchanged(self) -> dict[int, torch.Tensor]:
        """Return the copies that have the bits of a whole storage, by the storage: see `Offloader.leave`."""
        return self._unchanged

    def order(self) -> None:
        """Let what the device does next wait for the copies."""
        self._issued()
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def files(self) -> Files:
        """Wait for the copies and return those that this rank writes."""
        self._issued()
        if self._done is not None:
            self._done.synchronize()
        return self._files

    def shared(self) -> list[bytes]:
        """Wait for the copies and return those of this rank for other processes of the host; empty if not shared."""
        self.files()
        if self._shared is not None:
            self._packed = self._packed or pack_tensors(self._shared, in_calls(self._views))
            for _ in self._packed:
                keep_for_reader(self._shared)
        return self._packed

    def _issue(self, sources: Sequence[Source], places: Sequence[_Place]) -> None:
        under_way = 0
        with torch.cuda.stream(self._stream):
            for source, place in zip(sources, places, strict=True):
                _copy(source, place)
                self._done.record(self._stream)
                under_way += _bytes(source)
                if under_way >= _UNDER_WAY_BYTES:
                    self._done.synchronize()
                    under_way = 0

    def _issued(self) -> None:
        if self._copying is not None:
            self._copying.result()

    def _place(self, sources: Sequence[Source]) -> list[_Place]:
        """Lay the copies out in memory, which is made at the first time."""
        sized = [Sized(source.stem, source.name, _bytes(source), _holders(source)) for source in sources]
        if sized != self._sized:
            self._sized, self._owners = sized, owners(sized, self._ranks, self._whole)
        views: list[list[View]] = []
        end = 0
        for source, owner in zip(sources, self._owners, strict=True):
            views.append([])
            for one in source.stored if owner == self._rank else ():
                views[-1].append(View(*one, end))
                end += -(-_size(one) // _ALIGNED) * _ALIGNED
        found = [view for of_source in views for view in of_source]
        if len(self._memory) < end or found != self._views:
            self._packed = []
        if len(self._memory) < end:
            self._allocate(end)
        self._views, self._files = found, {}
        return [
            self._placed(source, of_source, owner)
            for source, of_source, owner in zip(sources, views, self._owners, strict=True)
        ]

    def _placed(self, source: Source, views: Sequence[View], owner: int) -> _Place:
        if owner == self._rank:
            stem = source.stem if source.stem in self._whole else stem_of_share(source.stem, self._rank, self._ranks)
            for view in views:
                dtype, content = str(view.dtype).removeprefix("torch."), _part(self._memory, view).numpy()
                self._files.setdefault(stem, []).append(HostTensor(view.name, dtype, list(view.shape), content))
        on_device = self._shared if self._stream is not None else None
        host, shared = (
            [] if memory is None else [_part(memory, view).view(view.dtype).view(view.shape) for view in views]
            for memory in (self._memory, on_device)
        )
        return _Place(owner, host, shared)

    def _allocate(self, size: int) -> None:
        if self._shares:
            self._shared = shared_memory(max(size, 1), self._device)
            if self._stream is None:
                self._memory = self._shared
                return
        self._memory = host_memory(size, self._device)


def _copy(source: Source, place: _Place) -> None:
    found = source.tensor.whole(place.to) if isinstance(source.tensor, Gathered) else source.tensor
    if found is None:
        return
    tensor = found.detach()
    if source.rest is not None:
        tensor = joined(tensor, source.rest)
    if source.adapter is not None:
        tensor = source.adapter.merged(tensor)
    tensor = tensor.to(source.dtype)
    whole: torch.Tensor | None = tensor
    if isinstance(tensor, DTensor):
        whole = _gathered(tensor, place.to) if _is_sharded(tensor) else tensor.to_local()
    if place.host and whole is not None:
        made = [whole] if source.form is None else quantise(source.form, whole)
        for number, one in enumerate(made):
            kept = place.shared[number].copy_(one) if place.shared else one
            place.host[number].copy_(kept, non_blocking=True)


def _gathered(tensor: DTensor, to: int) -> torch.Tensor | None:
    """Return a sharded tensor on one rank, and nothing on the others."""
    [placement, *others] = tensor.placements
    if others or not isinstance(placement, Shard):
        return tensor.full_tensor()
    mesh, dim = tensor.device_mesh, placement.dim
    size = -(-tensor.shape[dim] // mesh.size())  # of all parts but the last ones, which are filled up
    local = tensor.to_local()
    padded = local.new_zeros(*local.shape[:dim], size, *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    group = mesh.get_group()
    parts = [torch.empty_like(padded) for _ in range(mesh.size())] if dist.get_rank(group) == to else None
    dist.gather(padded, parts, group=group, group_dst=to)
    return None if parts is None else torch.cat(parts, dim).narrow(dim, 0, tensor.shape[dim])


def _holders(source: Source) -> Sequence[int]:
    return source.tensor.holders if isinstance(source.tensor, Gathered) else ()


def _part(memory: torch.Tensor, view: View) -> torch.Tensor:
    return memory[view.start : view.start + _size(view)]


def _size(stored: Stored | View) -> int:
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def _bytes(source: Source) -> int:
    return sum(map(_size, source.stored))


def _is_sharded(tensor: torch.Tensor | Gathered) -> bool:
    return isinstance(tensor, Gathered) or (isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1)
