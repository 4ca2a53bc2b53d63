"""Tensors in memory that other processes of the host map: shared memory, or that of a GPU by CUDA IPC.

They travel in the format of torch's own processes, which SGLang accepts: a pickled list of names and tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing import reductions

from asyncrl.weights.shared_names import NotShared, check_name

T = TypeVar("T")

torch_reductions: Any = reductions  # it has no types
_CALL_BYTES = 1 << 30  # of one call: a server may allocate room for its tensors in addition to the model
_TRIES = 10
_LATE = "manager connection has timed out"  # torch's process that keeps the names had no CPU for a second
_DEVICE = 6  # place of the device among the arguments of `rebuild_cuda_tensor`


class View(NamedTuple):
    """A tensor in a piece of memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte

    @property
    def offset(self) -> int:
        """Elements before it."""
        return self.start // self.dtype.itemsize


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


def shared_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return [size] bytes that other processes can map.

    Raises:
        NotShared: there is no room for them.
    """
    if device.type == "cuda":
        return _room(size, lambda: torch.empty(size, dtype=torch.uint8, device=device))
    storage = _room(size, lambda: torch.UntypedStorage._new_using_filename_cpu(size))
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _room(size: int, make: Callable[[], T]) -> T:
    tries = 0
    while True:
        try:
            return make()
        except RuntimeError as error:
            tries += 1
            if tries == _TRIES or _LATE not in str(error):
                words = f"{size} bytes for weights.transport cannot be shared ({error}); is /dev/shm large enough?"
                raise NotShared(words) from error


def keep_for_reader(memory: torch.Tensor) -> None:
    """Count one more process that will map the memory: torch removes its name when as many have let go of it."""
    storage: Any = memory.untyped_storage()
    if not memory.is_cuda:
        storage._shared_incref()


def in_calls(views: Sequence[View]) -> list[list[View]]:
    """Return tensors that lie one after the other by the call in which a server gets them."""
    found: dict[int, list[View]] = {}
    for view in views:
        found.setdefault(view.start // _CALL_BYTES, []).append(view)
    return [*found.values()]


def pack_tensors(memory: torch.Tensor, calls: Sequence[Sequence[View]]) -> list[bytes]:
    """Return tensors in shared memory as other processes of the host can read them, those of each call apart.

    GPUs are named by their identity: another process may number them in another way.
    """
    if memory.is_cuda:
        function, given = torch_reductions.reduce_tensor(memory)
        identity = str(torch.cuda.get_device_properties(memory.device).uuid)

        # Cell by cell: class, shape, stride, offset, class of the storage, type, device; the rest names the memory.
        def on_gpu(view: View) -> _Call:
            where = (given[0], view.shape, _stride(view.shape), view.offset)
            return _Call(function, *where, given[4], view.dtype, identity, *given[_DEVICE + 1 :])

        return [pickle.dumps([(view.name, on_gpu(view)) for view in views]) for views in calls]
    named = memory.untyped_storage()._share_filename_cpu_()
    storage = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *named)
    types = {view.dtype for views in calls for view in views}
    typed = {dtype: _Call(reductions.rebuild_typed_storage, storage, dtype) for dtype in types}

    def on_host(view: View) -> _Call:
        where = (view.offset, view.shape, _stride(view.shape), False)
        return _Call(reductions.rebuild_tensor, torch.Tensor, typed[view.dtype], where)

    return [pickle.dumps([(view.name, on_host(view)) for view in views]) for views in calls]


def unpack_tensors(packed: bytes) -> list[tuple[str, torch.Tensor]]:
    """Map the tensors of a `pack_tensors` of another process.

    Raises:
        NotShared: they are no such tensors, or their memory is gone.
    """
    try:
        found = _Unpickler(io.BytesIO(packed)).load()
    except Exception as error:  # any error of a damaged pickle
        raise NotShared(f"no tensors in shared memory: {type(error).__name__}: {error}") from error
    if not isinstance(found, list) or not all(_is_named(one) for one in found):
        raise NotShared("no list of names and tensors")
    return found


class _Unpickler(pickle.Unpickler):
    """Makes tensors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        check_name(module, name)
        return _rebuild_cuda if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def _rebuild_cuda(*given: Any) -> torch.Tensor:
    """As torch does, for a GPU that is named by its identity."""
    device = given[_DEVICE]
    if isinstance(device, str):
        count = torch.cuda.device_count()
        numbers = [index for index in range(count) if str(torch.cuda.get_device_properties(index).uuid) == device]
        if not numbers:
            raise NotShared(f"GPU {device} is not among the {count} that this process sees")
        device = numbers[0]
    rebuilt: torch.Tensor = torch_reductions.rebuild_cuda_tensor(*given[:_DEVICE], device, *given[_DEVICE + 1 :])
    return rebuilt


def _is_named(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], torch.Tensor)


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
