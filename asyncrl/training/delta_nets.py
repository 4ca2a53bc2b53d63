"""Gated delta nets of transformers over packed documents, with the kernels of flash-linear-attention on a GPU.

transformers resets the state of a gated delta net at the bounds of documents only with further packages. Elsewhere, and
in float32, each document is a separate row: see `asyncrl.training.document_model`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import conv1d, pad, silu, softplus

from asyncrl.data.model_dir import ModelError
from asyncrl.training.attention import Documents

_CONVOLUTIONS = ("fla.modules.causal_conv1d", "fla.modules.conv", "fla.modules.convolution")
"""Modules that have the convolution, by falling version of the package."""
_LENGTHS = (13, 150, 70)  # of the documents of the trial: within one chunk of 64 tokens, and over several
_SLOW = -4.0  # logarithm of the decay of the trial: a state lasts for about 40 tokens
_TOLERANCE = 0.05  # of the norm; bfloat16 rounds by less than 0.01, a wrong kernel by more than 0.3


class Kernels(NamedTuple):
    """The functions of flash-linear-attention."""

    rule: Callable[..., Any]  # `chunk_gated_delta_rule`
    convolution: Callable[..., Any]  # `causal_conv1d`
    version: str


def find_kernels() -> Kernels | None:
    """Return the kernels of flash-linear-attention; None if the package is not installed.

    Raises:
        ModelError: this version of the package cannot be imported, or lacks a kernel.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        convolution = _convolution()
    except Exception as error:  # whatever the import of an unsuitable version raises
        raise _unsuitable(error) from error
    disable: Any = torch.compiler.disable  # its call has no types
    return Kernels(rule, disable(convolution), _version())


def _convolution() -> Callable[..., Any]:
    for name in _CONVOLUTIONS:
        with suppress(ModuleNotFoundError):
            found: Callable[..., Any] = importlib.import_module(name).causal_conv1d
            return found
    raise ImportError("it has no causal_conv1d")


def torch_kernels() -> Kernels:
    """Return functions of torch in the place of the kernels, for rows of one document each."""
    models: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    rule = models.torch_chunk_gated_delta_rule
    return Kernels(getattr(rule, "__wrapped__", rule), _convolution_in_torch, torch.__version__)


def _convolution_in_torch(
    mixed: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, *, activation: str, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, None]:
    before = pad(mixed.mT, (kernel.shape[1] - 1, 0))
    return silu(conv1d(before, kernel[:, None], bias, groups=len(kernel))).mT, None


def _version() -> str:
    for name in ("fla-core", "flash-linear-attention"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def _unsuitable(reason: object) -> ModelError:
    found = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    return ModelError(
        f"flash-linear-attention {_version()} is installed, and fails here ({found}); "
        "install a version for this GPU, torch and triton, or uninstall it"
    )


def has_kernels(module: nn.Module) -> bool:
    """Return whether a part of a layer is a gated delta net that the kernels compute."""
    projections = hasattr(module, "in_proj_qkv") or hasattr(module, "in_proj_qkvz")
    return projections and all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj"))


def compute_in_torch(model: nn.Module) -> None:
    """Let transformers' forward passes of gated delta nets take its functions of torch, whatever is installed.

    The packages replace these functions where they are installed, and fail on CPUs and in float32.
    """
    module: Any  # a class of transformers
    for module in filter(has_kernels, model.modules()):
        owner: Any = sys.modules[type(module).__module__]
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            function = getattr(owner, name, None)
            setattr(owner, name, getattr(function, "__wrapped__", function))
        if hasattr(module, "chunk_gated_delta_rule"):  # up to transformers 5.16
            module.chunk_gated_delta_rule = owner.torch_chunk_gated_delta_rule
            module.causal_conv1d_fn = None  # its forward pass then calls the convolution of torch


def packed_forward(
    module: Any, kernels: Kernels, hidden_states: torch.Tensor, documents: Documents, **_options: Any
) -> torch.Tensor:
    """Compute a gated delta net whose state and convolution begin again with each document.

    Args:
        module: of transformers.
        hidden_states: [1, T, H]; for functions of torch [B, L, H], rows of one document each.
        documents: of the T tokens.

    Returns:
        As `hidden_states`.

    Source: Gated Delta Networks, arXiv 2412.06464, as in transformers' Qwen3-Next and Qwen3.5.
    """
    mixed, gate, beta, decay = _projected(module, hidden_states)
    heads = (*hidden_states.shape[:2], -1)
    kernel = module.conv1d.weight.squeeze(1)
    how = {"activation": module.activation, "cu_seqlens": documents.bounds}
    mixed = kernels.convolution(mixed, kernel, module.conv1d.bias, **how)[0]
    keys = module.key_dim
    query, key, value = torch.split(mixed, [keys, keys, module.value_dim], -1)
    query, key = (one.reshape(*heads, module.head_k_dim) for one in (query, key))
    value = value.reshape(*heads, module.head_v_dim)
    if (shared := value.shape[2] // key.shape[2]) > 1:
        query, key = (one.repeat_interleave(shared, 2) for one in (query, key))
    decay = -module.A_log.float().exp() * softplus(decay.float() + module.dt_bias)
    how = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": documents.bounds}
    found = kernels.rule(query, key, value, g=decay, beta=beta.sigmoid(), **how)[0]
    normed = module.norm(found.flatten(0, 2), gate.reshape(-1, module.head_v_dim))
    projected: torch.Tensor = module.out_proj(normed.view(heads))
    return projected


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value side by side, the gate of the output, and what rate and decay follow from."""
    if hasattr(module, "in_proj_qkv"):
        return module.in_proj_qkv(hidden), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
    query, key, value, gate, beta, decay = parts
    return torch.cat([one.flatten(2) for one in (query, key, value)], -1), gate, beta, decay


def check_kernels(module: Any, kernels: Kernels) -> None:
    """Compare output and gradient of the kernels with those of transformers' functions of torch, in bfloat16.

    Args:
        module: a gated delta net for which `compute_in_torch` was called.

    Raises:
        ModelError: they differ, or the kernels fail here.
    """
    device = module.out_proj.weight.device
    own = copy.deepcopy(module).to(torch.bfloat16)
    own.A_log.detach().fill_(_SLOW)  # a state that is soon forgotten would hide its errors
    bounds = [0, *accumulate(_LENGTHS)]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None].to(device)
    ends = torch.tensor(bounds, dtype=torch.int32, device=device)
    documents = Documents(positions, ends, max(_LENGTHS), tuple((1, length) for length in _LENGTHS))
    width = module.out_proj.out_features
    hidden, upstream = (torch.randn(1, bounds[-1], width, device=device, dtype=torch.bfloat16) for _ in range(2))

    def results(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        given = hidden.clone().requires_grad_()
        made = forward(given)
        return [made.detach().float(), *(one.float() for one in torch.autograd.grad(made, given, upstream))]

    def in_torch(given: torch.Tensor) -> torch.Tensor:
        rows = [type(own).forward(own, given[:, start:end]) for start, end in pairwise(bounds)]
        return torch.cat(rows, 1)

    with torch.enable_grad():
        expected = results(in_torch)
        try:
            found = results(lambda given: packed_forward(own, kernels, given, documents))
        except Exception as error:  # a compiler of kernels raises errors of many types
            raise _unsuitable(error) from error
    for name, one, exact in zip(("output", "gradient"), found, expected, strict=True):
        difference = float((one - exact).norm() / exact.norm())
        if not difference <= _TOLERANCE:
            raise _unsuitable(f"its {name} differs from that of torch by {difference:.2g} of the norm")
