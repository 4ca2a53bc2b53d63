"""What a list of tensors in shared memory may name: a pickle can name any function, and its reader calls it."""

from __future__ import annotations

import io
import pickle
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.weights.tensors import DTYPES

_REBUILD = ("rebuild_tensor", "rebuild_cuda_tensor", "rebuild_typed_storage", "rebuild_storage_filename")
_ALLOWED = {
    *(("torch.multiprocessing.reductions", name) for name in _REBUILD),
    *(("torch", name) for name in ("Tensor", "UntypedStorage", "Size", *DTYPES)),
    *(("torch.storage", name) for name in ("TypedStorage", "UntypedStorage")),
}


class NotShared(AsyncRLError):
    """Tensors that cannot be shared, or are invalid."""


class _Nothing:
    """Replaces named constructors, so that reading calls nothing."""

    def __init__(self, *_arguments: Any) -> None:
        pass


class _Names(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        check_name(module, name)
        return _Nothing


def check_name(module: str, name: str) -> None:
    """Raise NotShared unless a list of tensors may name it."""
    if (module, name) not in _ALLOWED:
        raise NotShared(f"{module}.{name} belongs to no tensor in shared memory")


def check_names(packed: bytes) -> None:
    """Check what a `pack_tensors` names, for a reader that may call anything, as an inference server does.

    Raises:
        NotShared: it names more than tensors need, or cannot be read.
    """
    try:
        _Names(io.BytesIO(packed)).load()
    except NotShared:
        raise
    except Exception as error:  # any error of a damaged pickle
        raise NotShared(f"no tensors in shared memory: {type(error).__name__}: {error}") from error
