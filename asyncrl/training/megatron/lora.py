"""Adapters of products that ranks share (LoRA, arXiv 2106.09685): the numbers of the torch trainer's, in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn
from torch.nn.functional import linear

from asyncrl.config.learner_settings import EXPERTS
from asyncrl.data.model_dir import ModelError
from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.base_trainer import WEIGHTS
from asyncrl.training.host_copy import Source
from asyncrl.training.lora import SEED, Lora, drawn
from asyncrl.training.megatron.experts import Experts
from asyncrl.training.megatron.lora_rows import adapter_problem, is_adaptable, target_of
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.sharded_params import Once, Parts, Place, Reading, Spread
from asyncrl.training.megatron.weight_map import NUMBERED, Family, Row
from asyncrl.weights.merging import added

_OF_EXPERTS = ("gate_up", "down")


class _Pair(nn.Module):
    """The adapter of a projection, or of a rank's part of it."""

    def __init__(self, weight: torch.Tensor, row: Row, rank: int, ranks: int) -> None:
        """
        Args:
            weight: of the product that makes the projection.
            row: of the projection.
            rank: of the adapter.
            ranks: that share the product; each has the gradient of one part of it.
        """
        super().__init__()
        divided = row.rule.split == 0
        self.rows = row.size[0] // ranks if divided else row.size[0]
        low: Any = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        high: Any = nn.Parameter(weight.new_zeros(self.rows, rank))
        (low if divided else high).sequence_parallel = ranks > 1  # the library adds up their gradients
        self.lora_A, self.lora_B = low, high

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return B A hidden."""
        return linear(linear(hidden, self.lora_A), self.lora_B)


class ProductAdapter(nn.Module):
    """The adapters of the projections that one product of the model makes side by side."""

    def __init__(self, weight: torch.Tensor, rows: Sequence[Row], lora: Lora, ranks: int, groups: int) -> None:
        """
        Args:
            weight: of the product.
            rows: of all its projections, in their order.
            lora: which of them have adapters.
            ranks: that share the product.
            groups: of rows of the product; each has a part of all projections.
        """
        super().__init__()
        self._scale, self._groups = lora.scale, groups
        self._parts: list[tuple[str, int]] = []  # name and number of rows
        for row in rows:
            name, pair = target_of(row.name), _Pair(weight, row, lora.rank, ranks)
            self._parts.append((name, pair.rows))
            if name in lora.targets:
                self.add_module(name, pair)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the summand of the product, [..., rows], for its input, [..., columns]."""
        lead, made = hidden.shape[:-1], []
        for name, rows in self._parts:
            pair = self._modules.get(name)
            one = hidden.new_zeros(*lead, rows) if pair is None else pair(hidden)
            made.append(one.view(*lead, self._groups, -1))
        return self._scale * torch.cat(made, -1).flatten(-2)


def add_adapters(chunks: Sequence[Any], family: Family, shape: ModelConfig, layout: Layout, lora: Lora) -> None:
    """Freeze the chunks of this rank's stage, and add adapters to their targets; `draw_adapters` fills them.

    Raises:
        ModelError: the layers lack a target, or the library computes it.
    """
    if problem := adapter_problem(family, shape, lora.targets):
        raise ModelError(f"learner.lora.targets: {problem}")
    for chunk in chunks:
        chunk.requires_grad_(False)
    products: dict[tuple[int, str], list[Row]] = {}
    for row in family.rows(shape):
        if is_adaptable(row, shape) and not NUMBERED.search(row.name):
            products.setdefault((row.layer, row.rule.parameter.removesuffix(".weight")), []).append(row)
    for (number, name), rows in products.items():
        place, local = layout.place_of(number, shape.layers)
        chunk, stage = divmod(place, layout.pipeline)
        adapted = any(target_of(row.name) in lora.targets for row in rows)
        if adapted and stage == parallel_state.get_pipeline_model_parallel_rank():
            product = chunks[chunk].decoder.layers[local].get_submodule(name)
            groups = shape.kv_heads // layout.tensor if name.endswith("linear_qkv") else 1
            product.adapter = ProductAdapter(product.weight, rows, lora, layout.tensor, groups)
    if EXPERTS in lora.targets:
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, Experts):
                module.adapt(lora)


@torch.no_grad()
def draw_adapters(parts: Parts) -> dict[torch.Tensor, torch.Tensor]:
    """Fill the adapters of a rank as the torch trainer does; returns the values of each A, in float32."""
    generator, found = torch.Generator().manual_seed(SEED), {}
    places = [place for place in parts.places if place.rule.adapter and place.name.endswith("lora_A")]
    for place in sorted(places, key=lambda place: place.rule.stacks):  # experts last
        whole = drawn(place.shape, generator)
        if place.parameter is not None:
            found[place.parameter] = parts.share(place, whole)
            place.parameter.copy_(found[place.parameter])
    return found


def merged_sources(
    parts: Parts, model: nn.Module, dtype: torch.dtype, exact: Reading, scale: float
) -> Iterator[Source]:
    """Yield the published tensors of a model, with its adapters in them.

    Args:
        parts: of the model.
        dtype: of the published weights.
        exact: reading of adapters.
        scale: alpha / rank.
    """
    adapters = {place.name: place for place in parts.places if place.rule.adapter}
    sums = Reading(Once(_sums_of_experts(model)))
    for place in parts.places:
        if place.rule.adapter:
            continue
        stem = place.name.removesuffix("weight")
        low, high = adapters.get(f"{stem}lora_A"), adapters.get(f"{stem}lora_B")
        tensor: Spread | _Merged = parts.gathering(place, sums if place.expert_rank is not None else Reading())
        if low is not None and high is not None:
            tensor = _Merged(parts, place, parts.gathering(high, exact), parts.gathering(low, exact), scale)
        yield Source(WEIGHTS, place.name, tensor, dtype if place.rule.trained else tensor.dtype)


def _sums_of_experts(model: nn.Module) -> Any:
    """Return a function from a projection of this rank's experts to its sum with the adapter."""
    experts = [one for one in model.modules() if isinstance(one, Experts)]
    owners = {getattr(one, name): (one, name) for one in experts for name in _OF_EXPERTS}

    def read(parameter: torch.Tensor) -> torch.Tensor:
        experts, name = owners[parameter]
        return experts.sum_of(name).detach()

    return read


class _Merged(Spread):
    """A projection with its adapter."""

    def __init__(self, parts: Parts, place: Place, high: Spread, low: Spread, scale: float) -> None:
        super().__init__(parts, place, Reading())
        self._high, self._low, self._scale = high, low, scale

    def whole(self, to: int) -> torch.Tensor | None:
        """Gather all three on a rank, and add them up."""
        weight, high, low = super().whole(to), self._high.whole(to), self._low.whole(to)
        if weight is None or high is None or low is None:
            return None
        return added(weight, high, low, self._scale)
