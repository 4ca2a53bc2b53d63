"""Gated delta nets (arXiv 2412.06464) whose heads ranks share: the library's own refuse several documents in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.nn.functional import linear, rms_norm, silu

from asyncrl.engine.embedded.config import DeltaConfig
from asyncrl.training.delta_nets import Kernels, find_kernels, packed_forward, torch_kernels
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.layers import Layer
from asyncrl.training.transformers_config import read_transformers_config


class _Product(nn.Module):
    """A matrix without bias, which is read from a file."""

    bias = None

    def __init__(self, config: Any, *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype))
        self.adapter: nn.Module | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the product, with its adapter."""
        made = linear(hidden, self.weight)
        return made if self.adapter is None else made + self.adapter(hidden)


class _GatedNorm(nn.Module):
    """The norm of each head, which a gate opens. Its gain is around 1 also where those of layers are around 0."""

    def __init__(self, config: Any, channels: int) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.empty(channels, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel  # each rank has the gradient of its own heads
        self.weight, self._eps = weight, config.layernorm_epsilon

    def forward(self, made: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise in float32, round, and open in float32, as transformers does."""
        normed = rms_norm(made.float(), self.weight.shape, None, self._eps).to(made.dtype)
        opened: torch.Tensor = self.weight * normed * silu(gate.float())
        return opened.to(made.dtype)


class DeltaNet(nn.Module):
    """The heads of this rank, with the names that `packed_forward` reads."""

    activation = "silu"
    kernels: Kernels | None = None
    """Of a GPU; None: functions of torch."""

    def __init__(self, config: Any, delta: DeltaConfig, **_: Any) -> None:
        super().__init__()
        ranks, hidden = config.tensor_model_parallel_size, config.hidden_size
        self.key_dim, _, self.value_dim = (channels // ranks for channels in delta.mixed)
        self.head_k_dim, self.head_v_dim = delta.key_dim, delta.value_dim
        heads, mixed = delta.value_heads // ranks, sum(delta.mixed) // ranks
        self.in_proj_qkv = _Product(config, mixed, hidden)
        self.in_proj_z = _Product(config, self.value_dim, hidden)
        self.in_proj_b, self.in_proj_a = (_Product(config, heads, hidden) for _ in range(2))
        self.conv1d = _Product(config, mixed, 1, delta.kernel)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads, dtype=config.params_dtype)) for _ in range(2))
        self.norm = _GatedNorm(config, delta.value_dim)
        self.out_proj = _Product(config, hidden, self.value_dim)
        self._divided = ranks > 1

    def forward(self, hidden: torch.Tensor, packed: PackedDocuments) -> torch.Tensor:
        """Compute the sum over the heads of all ranks, [T of this rank, 1, H] as the input."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self._divided:
            hidden = all_gather_tensor_autograd(hidden, 0, group)
        made = self._made(hidden.transpose(0, 1), packed).transpose(0, 1)
        return reduce_scatter_tensor_autograd(made, "sum", 0, group) if self._divided else made

    def _made(self, row: torch.Tensor, packed: PackedDocuments) -> torch.Tensor:
        """Return what the own heads make of a row of documents, [1, T, H]."""
        documents = packed.documents
        if self.kernels is not None:
            return packed_forward(self, self.kernels, row, documents)
        functions, padded = torch_kernels(), packed.padded
        return padded.joined([packed_forward(self, functions, row[0][one], documents) for one in padded.batches])


class DeltaLayer(Layer):
    """A layer with a delta net instead of attention."""

    compiles_attended = False

    def attended(self, hidden: torch.Tensor, documents: PackedDocuments, angles: torch.Tensor | None) -> torch.Tensor:
        """See `Layer`."""
        made = self.self_attention(self.input_layernorm(hidden), documents)
        return self._added(self.self_attn_bda, made, hidden)


def adapt_delta(layer: Any, delta: DeltaConfig) -> None:
    """Put a delta net into the library's specification of a layer."""
    layer.module = DeltaLayer
    layer.submodules.self_attention = ModuleSpec(DeltaNet, params={"delta": delta})


def use_kernels(model: nn.Module, directory: Path) -> None:
    """Compute the delta nets of a model with flash-linear-attention, if it is installed.

    Raises:
        ModelError: its kernels fail or differ from functions of torch on this GPU.
    """
    kernels = find_kernels()
    if kernels is None:
        return
    arrangement_of(read_transformers_config(directory))  # compares the kernels, once for each configuration
    for module in model.modules():
        if isinstance(module, DeltaNet):
            module.kernels = kernels
