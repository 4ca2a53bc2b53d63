"""Weights of a directory in memory that a server maps: that of its GPU, or shared memory of the host."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.weights.shared import NotShared, View, keep_for_reader, pack_tensors, shared_memory
from asyncrl.weights.tensors import HostTensor, tensors_in

_ALIGNED = 256
_AT_ONCE = 1 << 26  # bytes


class StagingMemory:
    """Holds one version after the other, in the same place."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[View] = []
        self._packed = b""
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def fill(self, directory: Path, device: torch.device, spare: int) -> bytes:
        """Copy all tensors of a directory; returns them as a server can map them.

        Args:
            spare: bytes that must stay free on a GPU.

        Raises:
            NotShared: there is no room for them.
            OSError, ValueError: they cannot be read.
        """
        tensors = [tensor for path in sorted(directory.glob("*.safetensors")) for tensor in tensors_in(path)]
        views, end = list[View](), 0
        for tensor in tensors:
            views.append(View(tensor.name, getattr(torch, tensor.dtype), tuple(tensor.shape), end))
            end += -(-len(tensor.content) // _ALIGNED) * _ALIGNED
        if len(self._memory) < end:
            if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < end + spare:
                raise NotShared(f"{free} bytes of the GPU are free, expected {end} of a version and {spare} more")
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees what was there first
            self._memory, self._packed = shared_memory(end, device), b""
        for tensor, view in zip(tensors, views, strict=True):
            self._copy(tensor, view.start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if views != self._views or not self._packed:
            self._views, [self._packed] = views, pack_tensors(self._memory, [views])
        keep_for_reader(self._memory)
        return self._packed

    def _copy(self, tensor: HostTensor, start: int) -> None:
        """Copy a tensor, through pinned memory where a GPU reads it."""
        if not len(self._bounce):
            self._bounce = torch.empty(_AT_ONCE, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        for begin in range(0, len(tensor.content), _AT_ONCE):
            part = tensor.content[begin : begin + _AT_ONCE]
            self._bounce.numpy()[: len(part)] = part
            self._memory[start + begin : start + begin + len(part)].copy_(self._bounce[: len(part)])
