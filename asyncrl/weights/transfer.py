"""Process groups by which tensors go from one process to a server: NCCL between GPUs, gloo between CPU processes.

The members find one another as those of SGLang's `init_weights_update_group` do, so either side may be SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import AsyncRLError
from asyncrl.weights.transfer_manifest import GroupPlace


class TransferFailed(AsyncRLError):
    """A group that cannot be joined, or a transfer that ended before all was there."""


class TransferGroup:
    """One member of a group; rank 0 sends.

    Raises, from every method:
        TransferFailed: another member is gone, or the time is up.
    """

    def __init__(self, place: GroupPlace, rank: int, *, timeout_s: float) -> None:
        """Join a group, and return when all have."""
        timeout = timedelta(seconds=timeout_s)
        parts: Any = dist
        try:
            found = parts.TCPStore(place.address, place.port, place.size, rank == 0, timeout=timeout)
            inner = parts.PrefixStore(f"{place.name}/", parts.PrefixStore(place.name, found))
            if place.backend == "nccl":
                options = parts.ProcessGroupNCCL.Options()
                options._timeout = timeout
                store = parts.PrefixStore("cuda/", inner)
                self._group: Any = parts.ProcessGroupNCCL(store, rank, place.size, options)
            else:
                options = parts.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [parts.ProcessGroupGloo.create_device(hostname=place.address)]
                store = parts.PrefixStore("cpu/", inner)
                self._group = parts.ProcessGroupGloo(store, rank, place.size, options)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise TransferFailed(f"group {place.name} at {place.address}:{place.port}: {error}") from error
        self._store = found  # others need it as long as the group is

    def has_sender(self) -> bool:
        """Return whether rank 0 is there, as far as another rank can see."""
        try:
            self._store.num_keys()
        except RuntimeError:
            return False
        return True

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, or fill them, in their order; returns when they are complete."""
        try:
            works = [self._group.broadcast(tensor, 0) for tensor in tensors]
            for work in works:
                work.wait()
            if any(tensor.is_cuda for tensor in tensors):
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise TransferFailed(str(error)) from error
