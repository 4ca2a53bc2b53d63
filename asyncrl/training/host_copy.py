"""Tensors copied to host memory that is kept from one copy to the next."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncrl.weights.tensors import Files, HostTensor

_ALIGNED = 64  # bytes
_UNDER_WAY_BYTES = 256 << 20  # copies queued at once: what a step copies to the device waits behind them


class Source(NamedTuple):
    """A tensor that is to be copied."""

    stem: str  # of the file that will hold it
    name: str
    tensor: torch.Tensor
    dtype: torch.dtype  # of the copy


class HostCopy:
    """Copies of tensors in host memory: page-locked, and made on a stream of their own, where they come from a GPU.

    The copies of one `begin` are there until the next one. Sharded tensors are gathered one at a time: every rank takes
    part, and the rank that keeps them has the whole of one on its device, and of all in its host memory.
    """

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self._keeps = keeps
        cuda: Any = torch.cuda if device.type == "cuda" else None
        self._stream = cuda.Stream(device) if cuda else None
        self._done: Any = cuda.Event() if cuda else None
        # The device's queue takes about a thousand copies; who queues more stands still until it has room.
        self._pool = ThreadPoolExecutor(1, "copies") if cuda else None
        self._copying: Future[None] | None = None
        self._memory: mmap.mmap | None = None
        self._files: dict[str, list[HostTensor]] = {}

    def begin(self, sources: Sequence[Source]) -> None:
        """Copy tensors, or on a GPU start to; a caller that changes the tensors calls `order` before."""
        places = self._place(sources) if self._keeps else [None] * len(sources)
        if self._stream is None or self._pool is None:
            _copy(sources, places)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        if any(_is_sharded(source.tensor) for source in sources):
            self._issue(sources, places)  # collectives keep their order in one thread
        else:
            self._copying = self._pool.submit(self._issue, sources, places)

    def order(self) -> None:
        """Let what the device does next wait for the copies."""
        self._issued()
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def files(self) -> Files:
        """Wait for the copies and return them; none where another rank keeps them."""
        self._issued()
        if self._done is not None:
            self._done.synchronize()
        return self._files

    def _issue(self, sources: Sequence[Source], places: Sequence[torch.Tensor | None]) -> None:
        under_way = 0
        with torch.cuda.stream(self._stream):
            for source, place in zip(sources, places, strict=True):
                _copy([source], [place])
                self._done.record(self._stream)
                under_way += source.tensor.numel() * source.dtype.itemsize
                if under_way >= _UNDER_WAY_BYTES:
                    self._done.synchronize()
                    under_way = 0

    def _issued(self) -> None:
        if self._copying is not None:
            self._copying.result()

    def _place(self, sources: Sequence[Source]) -> list[torch.Tensor | None]:
        """Lay the copies out in memory, which is made at the first time."""
        ends, end = [], 0
        for source in sources:
            size = source.tensor.numel() * source.dtype.itemsize
            ends.append((end, end + size))
            end += -(-size // _ALIGNED) * _ALIGNED
        if self._memory is None or len(self._memory) < end:
            self._memory = self._allocate(end)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        places: list[torch.Tensor | None] = []
        self._files = {}
        for source, (start, stop) in zip(sources, ends, strict=True):
            content, shape = whole[start:stop], list(source.tensor.shape)
            tensor = HostTensor(source.name, str(source.dtype).removeprefix("torch."), shape, content.numpy())
            self._files.setdefault(source.stem, []).append(tensor)
            places.append(content.view(source.dtype).view(shape))
        return places

    def _allocate(self, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if self._stream is not None:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            cuda: Any = torch.cuda
            cuda.check_error(cuda.cudart().cudaHostRegister(whole.data_ptr(), len(memory), 0))
        return memory


def _copy(sources: Iterable[Source], places: Iterable[torch.Tensor | None]) -> None:
    for source, place in zip(sources, places, strict=True):
        tensor = source.tensor.detach().to(source.dtype)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor.to_local()
        if place is not None:
            place.copy_(tensor, non_blocking=True)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1
