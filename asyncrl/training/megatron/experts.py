"""Experts by one grouped product: the library has it through other packages alone, or loops over experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from asyncrl.engine.embedded.config import ExpertsConfig, ModelConfig
from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.routing import replayed


class Experts(nn.Module):
    """The experts of this rank, as the library calls them."""

    def __init__(self, num_local_experts: int, config: Any, **_: Any) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up = self._parameter(num_local_experts, 2 * channels, hidden)
        self.down = self._parameter(num_local_experts, hidden, channels)

    @staticmethod
    def _parameter(*shape: int) -> nn.Parameter:
        parameter: Any = nn.Parameter(torch.empty(shape))
        # Its replicas are the ranks with the same experts, also where one expert-parallel rank has them all: these
        # have other tokens, tensor-parallel ranks too.
        parameter.allreduce = False
        # Without the mark the norm of the gradient misses the experts of other ranks, in silence.
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter  # type: ignore[no-any-return]

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            hidden: [T, H] ordered by expert.
            tokens_per_expert: [E of this rank].
            shares: [T] of the expert in its token.

        Returns:
            [T, H], and no bias.
        """
        ends = tokens_per_expert.to(hidden.device).cumsum(0).int()
        gate, up = F.grouped_mm(hidden, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        opened = F.silu(gate) * up * shares.unsqueeze(-1)
        return F.grouped_mm(opened.to(hidden.dtype), self.down.transpose(1, 2), offs=ends), None


class _Replay:
    """The choice of experts as the library asks for it; it has the same, but keeps micro-batches in a queue."""

    def __init__(self, recorded: torch.Tensor) -> None:
        self._recorded = recorded

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the chosen experts, [T, K], and these."""
        _, own = choose(scores, topk, num_groups=groups, group_topk=group_topk)
        chosen = replayed(own, self._recorded)
        return scores.gather(1, chosen), chosen


class ExpertLayer(TransformerLayer):  # type: ignore[misc]
    """The library's layer, whose router is told the experts of each call: a layer that is computed again in a backward
    pass gets those of its own micro-batch, whichever is under way (docs/routing-replay.md)."""

    def forward(self, *args: Any, packed_seq_params: PackedDocuments, **kwargs: Any) -> Any:
        """See `TransformerLayer`."""
        recorded = packed_seq_params.recorded
        self.mlp.router.router_replay = None if recorded is None else _Replay(recorded[:, self.layer_number - 1])
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def mixture_of(experts: ExpertsConfig) -> ModuleSpec:
    """Return what stands in the place of a feed-forward layer."""
    shared = None
    if experts.shared:
        products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        shared = ModuleSpec(SharedExpertMLP, submodules=products)
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=ModuleSpec(Experts), shared_experts=shared))


def expert_options(shape: ModelConfig, ranks: int) -> dict[str, Any]:
    """Return the options of a `TransformerConfig`.

    Args:
        ranks: that share the experts.
    """
    experts = shape.experts
    if experts is None:
        return {}
    options: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_pre_softmax": not experts.normalised,  # else the shares are those among the chosen experts
        "expert_model_parallel_size": ranks,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_router_topk_scaling_factor": experts.scale,
    }
    if experts.groups > 1:
        options |= {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.groups_chosen}
    if experts.corrected:
        options |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_pre_softmax": False,
        }
    return options


def keep_corrections(model: nn.Module) -> None:
    """Let the biases that correct scores stay in float32 in a model of another type."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()
