"""Tensors whose memory is given back while nothing uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncrl.training.host_memory import host_memory
from asyncrl.training.protocol import Offloaded

_ALIGNED = 64  # bytes
_AT_ONCE = 64  # tensors whose way to host memory begins by one call
_ROOM = 64 << 20  # of the device's memory, for what its allocator rounds up


class _Held(NamedTuple):
    """Content that is in host memory."""

    storage: torch.UntypedStorage
    own: torch.Tensor  # its bytes
    content: torch.Tensor  # where they are meanwhile, [bytes]
    copied: bool  # they were not there before

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content)


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
        self.away_s = 0.0  # seconds that the newest copy to host memory took; 0 if nothing had to leave
        self.back_s = 0.0  # seconds that the newest way back took; 0 if nothing had left

    @property
    def held_bytes(self) -> int:
        """Bytes that are in host memory now, instead of where the tensors lie."""
        return sum(held.size for held in self._held)

    def leave(
        self,
        tensors: Iterable[torch.Tensor],
        zeros: Iterable[torch.Tensor] = (),
        known: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Move the content of these away; of several on one storage once, of a sharded one the part of this rank.

        Args:
            zeros: tensors that hold nothing else, of which only the memory is given back.
            known: content that is in host memory already, [bytes], by `storage_key`. It stays there, unchanged, until
                all has come back.
        """
        began, self.away_s = time.monotonic(), 0.0
        leaving: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = _storage(tensor)
            if storage.resizable() and storage.nbytes():
                leaving[storage._cdata] = storage
        if leaving:
            held = self._taken(leaving, known or {})
            self.away_s = time.monotonic() - began
            self._held = held  # not before: what could not be copied must not come back
            for one in held:
                one.storage.resize_(0)
        for tensor in zeros:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                self._zeros.append((storage, storage.nbytes()))
                storage.resize_(0)

    def vacate(
        self,
        tensors: Iterable[torch.Tensor],
        zeros: Iterable[torch.Tensor],
        known: Mapping[int, torch.Tensor],
        *,
        began: float,
    ) -> Offloaded:
        """Move content away as `leave` does, and let other processes have the memory.

        Args:
            began: monotonic time at which the wait for what may still read the tensors began.
        """
        self._synchronize()
        waited = time.monotonic()
        self.leave(tensors, zeros, known)
        left = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved(self._device)
        copied = sum(held.size for held in self._held if held.copied)
        free_s = time.monotonic() - waited - self.away_s
        return Offloaded(self.held_bytes, waited - began, self.away_s, free_s, copied, left)

    def _taken(self, leaving: Mapping[int, torch.UntypedStorage], known: Mapping[int, torch.Tensor]) -> list[_Held]:
        """Copy what is not known into the memory of this."""
        assert not self._held, "what has left comes back before more leaves"
        sizes = [one.nbytes() for key, one in leaving.items() if key not in known]
        cut = [part for size in sizes for part in (size, -size % _ALIGNED)]
        if len(self._memory) < sum(cut):
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees what was there first
            self._memory = host_memory(sum(cut), self._device)
        places = iter(torch.split(self._memory[: sum(cut)], cut)[::2] if cut else ())
        held: list[_Held] = []
        # The first ones are on their way while the others are prepared, for which threads that write take turns, too.
        items = list(leaving.items())
        for begin in range(0, len(items), _AT_ONCE):
            of_call = [
                _Held(one, _bytes_of(one), known[key] if key in known else next(places), key not in known)
                for key, one in items[begin : begin + _AT_ONCE]
            ]
            held += of_call
            copied = [one for one in of_call if one.copied]
            self._copy([one.content for one in copied], [one.own for one in copied])
        self._synchronize()
        return held

    def come_back(self) -> None:
        """Move all content back."""
        began = time.monotonic()
        for held in self._held:
            held.storage.resize_(held.size)
        while self._zeros:
            storage, size = self._zeros.pop()
            storage.resize_(size)
            _bytes_of(storage).zero_()
        back = bool(self._held)
        if back:
            self._copy([held.own for held in self._held], [held.content for held in self._held])
            self._synchronize()
            self._held.clear()
        self.back_s = time.monotonic() - began if back else 0.0

    def reserve(self) -> None:
        """Let an allocator that has nothing get the memory for all that comes back in one piece.

        A thousand tensors, each of a piece of its own, take as long to allocate and to free as to copy.
        """
        size = self.held_bytes + sum(size for _, size in self._zeros)
        if self._device.type == "cuda" and size:
            with suppress(torch.OutOfMemoryError):  # what others left between theirs may still be enough for each piece
                torch.empty(size + _ROOM, dtype=torch.uint8, device=self._device)

    def _copy(self, to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        """Start to copy tensors, by one call: by a call for each, threads that write a version take turns with them."""
        if to:
            torch._foreach_copy_(to, of, non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tensors of one storage have in common, as long as there is one."""
    key: int = _storage(tensor)._cdata
    return key


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
