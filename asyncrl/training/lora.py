"""Low-rank adapters: of the projections of each layer only a product of two thin matrices is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from asyncrl.config.learner_settings import EXPERTS
from asyncrl.data.model_dir import ModelError
from asyncrl.weights.adapters import PEFT_PREFIX
from asyncrl.weights.merging import added

SEED = 0  # of the initial matrices: every rank, and every start, has the same ones


@dataclass(frozen=True, slots=True)
class Lora:
    """The shape of adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last names of the layers' linear modules, and `EXPERTS`
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


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw the first A of a projection, [rank, in], or of experts, [E, rank, in]."""
    if len(shape) == 3:
        bound: float = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-1, 1, generator=generator) * bound
    found = torch.empty(shape)
    nn.init.kaiming_uniform_(found, a=math.sqrt(5), generator=generator)
    return found


class LoraLinear(nn.Linear):
    """A frozen projection W plus alpha / rank * B A. W keeps its name.

    Source: LoRA, arXiv 2106.09685, section 4.1: A random, B zero, so that the first policy is the model itself.
    """

    def __init__(self, base: nn.Linear, lora: Lora, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = lora.scale
        self.lora_A = nn.Parameter(drawn((lora.rank, self.in_features), generator).to(base.weight))
        self.lora_B = nn.Parameter(base.weight.new_zeros(self.out_features, lora.rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project, with the adapter."""
        low = functional.linear(hidden, self.lora_A)
        return super().forward(hidden) + self.scale * functional.linear(low, self.lora_B)


class _LoraExperts(nn.Module):
    """Experts whose projections, [E, a, b] each, are frozen ones plus alpha / rank * B A.

    The class of a model's experts is replaced by one that inherits from both. So each implementation of experts in
    transformers reads the sums. A pass computes them once.
    """

    lora_scale: float
    lora_sums: dict[str, torch.Tensor]  # of the pass that runs

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Compute the experts, with the adapters."""
        own = self._parameters
        self.lora_sums = {name: self.lora_sum(name) for name in own if f"{name}_lora_A" in own}
        try:
            return super().forward(*arguments, **options)
        finally:
            self.lora_sums = {}

    def lora_sum(self, name: str) -> torch.Tensor:
        """Return a projection with its adapter."""
        own = self._parameters
        weight, high, low = own[name], own[f"{name}_lora_B"], own[f"{name}_lora_A"]
        assert weight is not None and high is not None and low is not None
        return added(weight, high, low, self.lora_scale)


def _sum_of(name: str) -> property:
    def read(module: Any) -> torch.Tensor:
        found: torch.Tensor | None = module.lora_sums.get(name)
        return module.lora_sum(name) if found is None else found

    return property(read)


def _adapt_experts(module: Any, lora: Lora, generator: torch.Generator) -> None:
    """Add an adapter to each projection of a layer's experts."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ModelError(
            f"learner.lora.targets: adapters of experts are on one rank, found {dist.get_world_size()}; "
            "set learner.ranks = 1, or leave experts out"
        )
    names = [name for name, one in module.named_parameters(recurse=False) if one.ndim == 3]
    for name in names:
        weight = getattr(module, name)
        experts, rows, columns = weight.shape
        low = drawn((experts, lora.rank, columns), generator).to(weight)
        module.register_parameter(f"{name}_lora_A", nn.Parameter(low))
        module.register_parameter(f"{name}_lora_B", nn.Parameter(weight.new_zeros(experts, rows, lora.rank)))
    own = type(module)
    module.lora_scale, module.lora_sums = lora.scale, {}
    module.__class__ = type(own.__name__, (_LoraExperts, own), {name: _sum_of(name) for name in names})


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze a model, and add adapters to the targets in its layers.

    Raises:
        ModelError: the layers lack a target, or experts shall have adapters on several ranks.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    found = set[str]()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        parent, _, last = name.rpartition(".")
        if last in lora.targets:
            found.add(last)
            setattr(model.get_submodule(parent), last, LoraLinear(module, lora, generator))
    if EXPERTS in lora.targets:
        for name, module in list(model.named_modules()):
            if name.endswith(f".{EXPERTS}") and any(one.ndim == 3 for one in module.parameters(recurse=False)):
                found.add(EXPERTS)
                _adapt_experts(module, lora, generator)
    if missing := [target for target in lora.targets if target not in found]:
        there = sorted({name.rpartition(".")[2] for name in linears if ".layers." in name})
        raise ModelError(
            f"learner.lora.targets: the layers of {type(model).__name__} have no {', '.join(missing)}, expected some "
            f"of {', '.join(there)}"
        )


class Adapter(NamedTuple):
    """The addition to a projection [out, in], or [E, out, in] of experts, for a model that engines load."""

    high: torch.Tensor  # [out, rank]
    low: torch.Tensor  # [rank, in]; the addition is scale * high @ low
    scale: float  # alpha / rank

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Add it to a projection."""
        return added(weight, self.high.detach(), self.low.detach(), self.scale)

    def part(self, index: tuple[int | slice, ...]) -> Adapter:
        """Return the addition to `projection[index]`."""
        rest: list[int | slice] = [slice(None)] * (self.high.ndim - len(index))
        *experts, rows, columns = [*index, *rest]
        return Adapter(self.high[(*experts, rows)], self.low[(*experts, slice(None), columns)], self.scale)


def with_adapters(
    parameters: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor, Adapter | None]]:
    """Names and tensors of the model that engines load, each with the adapter that belongs into it.

    Args:
        parameters: of the model by name, with those of its adapters.
        scale: alpha / rank.
    """
    for name, parameter in parameters.items():
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        low, high = parameters.get(f"{stem}lora_A"), parameters.get(f"{stem}lora_B")
        if not is_adapter(name):
            yield name, parameter, None if low is None or high is None else Adapter(high, low, scale)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B", "_proj_lora_A", "_proj_lora_B"))


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in PEFT's files."""
    return f"{PEFT_PREFIX}{name}.weight"
