"""Products of linear layers in a separate dtype, which `learner.dtype` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from asyncrl.data.model_dir import ModelError

Multiply: TypeAlias = Callable[..., torch.Tensor]
"""As `torch.nn.functional.linear`: [..., out] of hidden states [..., in], a weight [out, in], and a bias or none."""


def multiply_of(dtype: str, device: torch.device) -> Multiply | None:
    """Return the product of a `learner.dtype`; None for the dtype of the weights.

    Raises:
        ModelError: Transformer Engine or the GPU does not have it.
    """
    if dtype != "fp8":
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:  # later ones take other scales
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ModelError(f'learner.dtype = "fp8": found {found}, expected a Hopper GPU (H100, H200); set "bfloat16"')
    try:
        from asyncrl.training.megatron.fp8 import absence, product
    except (ImportError, OSError, AssertionError, RuntimeError) as error:  # built for another torch or CUDA
        raise ModelError(f'learner.dtype = "fp8" needs Transformer Engine, which cannot be loaded: {error}') from error
    if why := absence():
        raise ModelError(f'learner.dtype = "fp8": {why} Set "bfloat16".')
    return product
