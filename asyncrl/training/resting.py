"""Tensors whose memory is given back while nothing uses them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class Resting:
    """Moves the content of tensors to host memory, and back into the same tensors, bit for bit.

    The tensors stay what they are: their storage has no bytes meanwhile. Whatever is mapped from a file stays.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []  # what held zeros, and how many bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are in host memory now, instead of where the tensors lie."""
        return sum(len(content) for _, content in self._held)

    def leave(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor] = ()) -> None:
        """Move the content of these away; of several on one storage once, of a sharded one the part of this rank.

        Args:
            zeros: tensors that hold nothing else, of which only the memory is given back.
        """
        for tensor in zeros:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                self._zeros.append((storage, storage.nbytes()))
                storage.resize_(0)
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).untyped_storage()
            if storage.resizable() and storage.nbytes():
                content = _bytes_of(storage)
                # A copy also on a CPU, where `cpu` alone would be the same memory.
                self._held.append((storage, content.to("cpu", copy=True)))
                storage.resize_(0)

    def come_back(self) -> None:
        """Move all content back."""
        while self._held:
            storage, content = self._held.pop()
            storage.resize_(len(content))
            _bytes_of(storage).copy_(content)
        while self._zeros:
            storage, size = self._zeros.pop()
            storage.resize_(size)
            _bytes_of(storage).zero_()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
