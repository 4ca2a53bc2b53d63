"""Tensors whose memory is given back while nothing uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncrl.training.host_memory import host_memory
from asyncrl.training.protocol import Offloaded

_ALIGNED = 64  # bytes
_ROOM = 64 << 20  # of the device's memory, for what its allocator rounds up


class _Held(NamedTuple):
    """Content that is in host memory."""

    own: torch.Tensor  # all of its storage
    content: torch.Tensor  # its place in host memory, with equal shape and dtype
    copied: bool  # it was not there before

    @property
    def size(self) -> int:
        """Bytes."""
        return self.content.nbytes

    def resize(self, size: int) -> None:
        """Resize the storage to this many bytes."""
        self.own.untyped_storage().resize_(size)


class Offloader:
    """Moves the content of tensors to host memory, and back into the same tensors, bit for bit.

    The tensors stay valid objects; their storage is empty until they return. Tensors mapped from files stay. The
    host memory, page-locked where the tensors lie on a GPU, is kept from one time to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._form: list[tuple[torch.dtype, torch.Size]] = []  # of the tensors that had places in it
        self._places: list[torch.Tensor] = []  # of them
        self._held: list[_Held] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []  # what held zeros, and how many bytes
        self.onload_s = 0.0  # seconds that the newest way back took; 0 if nothing had left

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
            known: content that is in host memory already, by `storage_key`. It stays there, unchanged, until
                all has come back.
        """
        self._move(self._placed(tensors, known or {}))
        self._drop(zeros)

    def vacate(
        self,
        tensors: Iterable[torch.Tensor],
        zeros: Iterable[torch.Tensor],
        known: Mapping[int, torch.Tensor],
        order: Callable[[], None],
    ) -> Offloaded:
        """Move content away as `leave` does, and let other processes have the memory.

        Args:
            order: lets the device wait for what may still read the tensors. It is called when all destinations exist,
                while the device still copies.
        """
        began = time.monotonic()
        held = self._placed(tensors, known)
        order()
        self._synchronize()
        waited = time.monotonic()
        self._move(held)
        moved = time.monotonic()
        self._drop(zeros)
        left = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved(self._device)
        copied = sum(one.size for one in self._held if one.copied)
        return Offloaded(self.held_bytes, waited - began, moved - waited, time.monotonic() - moved, copied, left)

    def _placed(self, tensors: Iterable[torch.Tensor], known: Mapping[int, torch.Tensor]) -> list[_Held]:
        """Places in the memory of this for the content that is not known; the memory is made at the first time."""
        leaving = dict[int, torch.Tensor]()
        for tensor in tensors:
            local = _local(tensor)
            storage = local.untyped_storage()
            if storage.resizable() and storage.nbytes() and storage._cdata not in leaving:
                leaving[storage._cdata] = _whole(local, known.get(storage._cdata))
        assert not (leaving and self._held), "bring it back before more leaves"
        places = iter(self._cut([own for key, own in leaving.items() if key not in known]))
        return [
            _Held(own, _alike(known[key], own) if key in known else next(places), key not in known)
            for key, own in leaving.items()
        ]

    def _cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Places of this memory for such tensors, which most often are those of the time before.

        Each call of torch releases the interpreter to other threads; with threads that write a version, two calls per
        tensor would take half as long as the copy.
        """
        form = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if form != self._form:
            sizes = [tensor.nbytes for tensor in tensors]
            cut = [part for size in sizes for part in (size, -size % _ALIGNED)]
            self._form, self._places = [], []
            if len(self._memory) < sum(cut):
                self._memory = torch.empty(0, dtype=torch.uint8)  # frees the earlier copies first
                self._memory = host_memory(sum(cut), self._device)
            parts = torch.split(self._memory[: sum(cut)], cut)[::2] if cut else ()
            self._places = [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, form, strict=True)]
            self._form = form
        return self._places

    def _move(self, held: list[_Held]) -> None:
        """Copy content to its places, and give its memory back."""
        if not held:
            return
        copied = [one for one in held if one.copied]
        self._copy([one.content for one in copied], [one.own for one in copied])
        self._synchronize()
        self._held = held  # not before: what could not be copied must not come back
        for one in held:
            one.resize(0)

    def _drop(self, zeros: Iterable[torch.Tensor]) -> None:
        """Give the memory of these back."""
        for tensor in zeros:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                self._zeros.append((storage, storage.nbytes()))
                storage.resize_(0)

    def come_back(self) -> None:
        """Move all content back."""
        began = time.monotonic()
        for held in self._held:
            held.resize(held.size)
        while self._zeros:
            storage, size = self._zeros.pop()
            storage.resize_(size)
            _bytes_of(storage).zero_()
        back = bool(self._held)
        if back:
            self._copy([held.own for held in self._held], [held.content for held in self._held])
            self._synchronize()
            self._held.clear()
        self.onload_s = time.monotonic() - began if back else 0.0

    def reserve(self) -> None:
        """Let an allocator that has nothing get the memory for all that comes back in one piece.

        Allocating and freeing a thousand separate tensors takes as long as copying them.
        """
        size = self.held_bytes + sum(size for _, size in self._zeros)
        if self._device.type == "cuda" and size:
            with suppress(torch.OutOfMemoryError):  # what others left between theirs may still be enough for each piece
                torch.empty(size + _ROOM, dtype=torch.uint8, device=self._device)

    def _copy(self, to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        """Start to copy tensors, by one call: by a call for each, threads that write a version take turns with them."""
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, of, non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tensors of one storage have in common, as long as there is one."""
    key: int = _local(tensor).untyped_storage()._cdata
    return key


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of this rank."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _whole(tensor: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor with all bytes of its storage."""
    storage = tensor.untyped_storage()
    if known is not None:
        same = (known.dtype, known.shape) == (tensor.dtype, tensor.shape)
    else:
        same = tensor.nbytes == storage.nbytes()
    return tensor if same and tensor.is_contiguous() else _bytes_of(storage)


def _alike(known: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return known content in the form of the tensor that it is of."""
    return known if known.dtype == own.dtype and known.shape == own.shape else known.flatten().view(torch.uint8)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
