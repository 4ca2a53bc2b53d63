"""Host memory that a GPU copies to and from: large, made once and kept."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_THREADS = min(16, os.cpu_count() or 1)
_AT_ONCE = 1 << 28  # bytes


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return [size] bytes of host memory, page-locked where the device is a GPU: it copies to that at its full rate."""
    memory = (_PageLocked if device.type == "cuda" else mmap.mmap)(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    if isinstance(memory, _PageLocked):
        fill_at_once(found)
        memory.lock(found.data_ptr())
    return found


def fill_at_once(memory: torch.Tensor) -> None:
    """Fill memory with zeros, by several threads: a driver that locks pages makes those that lack one by one."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(torch.Tensor.zero_, torch.split(memory, _AT_ONCE)):
            pass


class _PageLocked(mmap.mmap):
    """Memory whose pages the driver locks while anything refers to it: otherwise a later mapping there could not be
    locked.
    """

    _address = 0

    def lock(self, address: int) -> None:
        """Lock all of it, which begins at this address."""
        cuda: Any = torch.cuda
        cuda.check_error(cuda.cudart().cudaHostRegister(address, len(self), 0))
        self._address = address

    def __del__(self) -> None:
        if self._address and torch is not None:  # at the end of the process its modules may be gone
            cuda: Any = torch.cuda
            cuda.cudart().cudaHostUnregister(self._address)
