"""Low-rank adapters: of the projections of each layer only a product of two thin matrices is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn import functional

from asyncrl.weights.adapters import PEFT_PREFIX
from asyncrl.weights.merging import added

_SEED = 0  # of the initial matrices: every rank, and every start, has the same ones


@dataclass(frozen=True, slots=True)
class Lora:
    """The shape of adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last names of the layers' linear modules
    published: bool = False  # versions are adapters; else they are whole models, with the adapters in them

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank

    def config(self) -> bytes:
        """The content of `asyncrl.weights.adapters.ADAPTER_CONFIG`."""
        values = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(self.targets),
        }
        return msgspec.json.format(msgspec.json.encode(values))


class LoraLinear(nn.Linear):
    """A frozen projection W plus alpha / rank * B A. W keeps its name.

    Source: LoRA, arXiv 2106.09685, section 4.1: A random, B zero, so that the first policy is the model itself.
    """

    def __init__(self, base: nn.Linear, lora: Lora, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = lora.scale
        drawn = torch.empty(lora.rank, self.in_features)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(drawn.to(base.weight))
        self.lora_B = nn.Parameter(base.weight.new_zeros(self.out_features, lora.rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project, with the adapter."""
        low = functional.linear(hidden, self.lora_A)
        return super().forward(hidden) + self.scale * functional.linear(low, self.lora_B)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze a model, and add adapters to the targets in its layers."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(_SEED)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        parent, _, last = name.rpartition(".")
        if last in lora.targets:
            setattr(model.get_submodule(parent), last, LoraLinear(module, lora, generator))


class Adapter(NamedTuple):
    """The addition to a projection [out, in] for a model that engines load: scale * high @ low."""

    high: torch.Tensor  # [out, rank]
    low: torch.Tensor  # [rank, in]
    scale: float  # alpha / rank

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Add it to a projection."""
        return added(weight, self.high.detach(), self.low.detach(), self.scale)


def with_adapters(
    parameters: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor, Adapter | None]]:
    """Names and tensors of the model that engines load, each with the adapter that belongs into it.

    Args:
        parameters: of the model by name, with those of its adapters.
        scale: alpha / rank.
    """
    for name, parameter in parameters.items():
        module = name.removesuffix("weight")
        low, high = parameters.get(f"{module}lora_A"), parameters.get(f"{module}lora_B")
        if not is_adapter(name):
            yield name, parameter, None if low is None or high is None else Adapter(high, low, scale)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in PEFT's files."""
    return f"{PEFT_PREFIX}{name}.weight"
