"""A tensor whose memory the operating system provides page by page, when a value is written."""

from __future__ import annotations

import math
import mmap
import sys

import torch

from asyncrl.engine.errors import EngineError

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: only written pages count as memory


class Paged:
    """Zeros of a shape that is larger than memory; `free` gives written pages back."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Reserve addresses for the tensor.

        Raises:
            EngineError: the system refuses this many.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except (OSError, OverflowError) as fault:
            raise EngineError(
                f"keys and values: the system refuses {size / 2**30:,.0f} GiB of addresses ({fault}); lower "
                "engine.max_running or engine.context, or raise the limit (ulimit -v, vm.overcommit_memory)"
            ) from fault
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # a few tokens would take 2 MiB
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def free(self, start: int, length: int) -> None:
        """Give back the pages that lie wholly within some of the numbers; those become zero.

        Args:
            start: index of the first number in the flat tensor.
            length: how many numbers.
        """
        first = -(-start * self.tensor.itemsize // mmap.PAGESIZE)
        pages = (start + length) * self.tensor.itemsize // mmap.PAGESIZE - first
        if pages > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, pages * mmap.PAGESIZE)
