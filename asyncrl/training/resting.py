"""Tensors whose memory is given back while nothing uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncrl.training.host_memory import host_memory

_ALIGNED = 64  # bytes
_ROOM = 64 << 20  # of the device's memory, for what its allocator rounds up


class _Held(NamedTuple):
    """Content that is in host memory."""

    storage: torch.UntypedStorage
    start: int  # byte of the host memory
    size: int  # bytes


class Resting:
    """Moves the content of tensors to host memory, and back into the same tensors, bit for bit.

    The tensors stay what they are: their storage has no bytes meanwhile. Whatever is mapped from a file stays. The
    host memory, page-locked where the tensors lie on a GPU, is kept from one time to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: list[_Held] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []  # what held zeros, and how many bytes
        self.back_s = 0.0  # seconds that the newest way back took; 0 if nothing had left

    @property
    def held_bytes(self) -> int:
        """Bytes that are in host memory now, instead of where the tensors lie."""
        return sum(held.size for held in self._held)

    def leave(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor] = ()) -> None:
        """Move the content of these away; of several on one storage once, of a sharded one the part of this rank.

        Args:
            zeros: tensors that hold nothing else, of which only the memory is given back.
        """
        leaving: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).untyped_storage()
            if storage.resizable() and storage.nbytes():
                leaving[storage.data_ptr()] = storage
        if leaving:
            self._take(leaving.values())
        for tensor in zeros:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                self._zeros.append((storage, storage.nbytes()))
                storage.resize_(0)

    def _take(self, storages: Iterable[torch.UntypedStorage]) -> None:
        assert not self._held, "what has left comes back before more leaves"
        held, end = list[_Held](), 0
        for storage in storages:
            held.append(_Held(storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        if len(self._memory) < end:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees what was there first
            self._memory = host_memory(end, self._device)
        for one in held:
            self._content(one).copy_(_bytes_of(one.storage), non_blocking=True)
        self._synchronize()
        self._held = held  # not before: what could not be copied must not come back
        for one in held:
            one.storage.resize_(0)

    def come_back(self) -> None:
        """Move all content back."""
        began = time.monotonic()
        for held in self._held:
            held.storage.resize_(held.size)
            _bytes_of(held.storage).copy_(self._content(held), non_blocking=True)
        while self._zeros:
            storage, size = self._zeros.pop()
            storage.resize_(size)
            _bytes_of(storage).zero_()
        back = bool(self._held)
        if back:
            self._held.clear()
            self._synchronize()
        self.back_s = time.monotonic() - began if back else 0.0

    def reserve(self) -> None:
        """Let an allocator that has nothing get the memory for all that comes back in one piece.

        A thousand tensors, each of a piece of its own, take as long to allocate and to free as to copy.
        """
        size = sum(held.size for held in self._held) + sum(size for _, size in self._zeros)
        if self._device.type == "cuda" and size:
            with suppress(torch.OutOfMemoryError):  # what others left between theirs may still be enough for each piece
                torch.empty(size + _ROOM, dtype=torch.uint8, device=self._device)

    def _content(self, held: _Held) -> torch.Tensor:
        return self._memory[held.start : held.start + held.size]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
