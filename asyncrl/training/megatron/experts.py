"""Experts by one grouped product: the library has it through other packages alone, or loops over experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.lora import Lora
from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.layers import Layer
from asyncrl.training.routing import replayed
from asyncrl.weights.merging import added


def _opened(gate_up: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the channels that their gates open, times the shares of the experts."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * shares.unsqueeze(-1)).to(gate_up.dtype)


class Experts(nn.Module):
    """The experts of this rank, or its share of their channels."""

    def __init__(self, count: int, config: Any, ranks: int = 1) -> None:
        """
        Args:
            ranks: that share each of them.
        """
        super().__init__()
        hidden, channels = config.hidden_size, config.moe_ffn_hidden_size // ranks
        self.gate_up = self._parameter(count, 2 * channels, hidden)
        self.down = self._parameter(count, hidden, channels)
        self.opened = _opened
        self._scale = 0.0  # of adapters

    def adapt(self, lora: Lora) -> None:
        """Add an adapter to each projection, which is frozen."""
        self._scale = lora.scale
        for name in ("gate_up", "down"):
            count, rows, columns = getattr(self, name).shape
            low, high = self._parameter(count, lora.rank, columns), self._parameter(count, rows, lora.rank)
            nn.init.zeros_(high)
            for letter, one in (("A", low), ("B", high)):
                one.data = one.to(self.gate_up.dtype)
                self.register_parameter(f"{name}_lora_{letter}", one)

    def sum_of(self, name: str) -> torch.Tensor:
        """Return a projection of all own experts, with its adapter."""
        held = self._parameters
        weight, high, low = held[name], held.get(f"{name}_lora_B"), held.get(f"{name}_lora_A")
        assert weight is not None
        return weight if high is None or low is None else added(weight, high, low, self._scale)

    @staticmethod
    def _parameter(*shape: int) -> nn.Parameter:
        parameter: Any = nn.Parameter(torch.empty(shape))
        # Its replicas are the ranks with the same experts, even if one expert-parallel rank has all of them: these
        # ranks, tensor-parallel ones too, have other tokens.
        parameter.allreduce = False
        # Without the mark the norm of the gradient misses the experts of other ranks, in silence.
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter  # type: ignore[no-any-return]

    def forward(self, hidden: torch.Tensor, counts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden: [N, H] ordered by expert.
            counts: [E of this rank] rows of each.
            shares: [N] of the expert in its token.

        Returns:
            [N, H].
        """
        if not len(hidden):  # of this rank nothing is asked, but it takes part in the exchanges of gradients
            return hidden * shares.unsqueeze(-1).to(hidden.dtype)
        ends = counts.cumsum(0).int()
        opened = self.opened(self._products(hidden, self.sum_of("gate_up"), ends), shares)
        return self._products(opened, self.sum_of("down"), ends)

    def _products(self, hidden: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply rows, of which each expert has those up to its end, by its matrix of `weight`, [E, out, in]."""
        return F.grouped_mm(hidden, weight.transpose(1, 2), offs=ends)


class _ToExperts(torch.autograd.Function):
    """Rows of tokens in the order of their experts. Gradients are summed in the order of tokens, so they are the same
    bits each time, as sums by atomic additions are not.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        return hidden.index_select(0, order // chosen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _summed(grads[0], order, ctx.chosen), None, None


class _ToTokens(torch.autograd.Function):
    """The sums of what experts made of each token."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        return _summed(made, order, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.chosen), None, None


def _to_experts(hidden: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = _ToExperts.apply
    return apply(hidden, order, chosen)


def _to_tokens(made: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = _ToTokens.apply
    return apply(made, order, chosen)


def _summed(rows: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows.index_select(0, places).view(-1, chosen, rows.shape[-1]).sum(1)


class ExpertMixture(nn.Module):
    """Experts in the place of a feed-forward layer. The library's dispatcher waits for the GPU in each layer, copies
    rows that do not move, and sums by atomic additions; router and shared experts are the library's.
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        groups = get_default_pg_collection()
        self._group, self._chosen = groups.ep, config.moe_router_topk
        self._ranks = dist.get_world_size(self._group)
        self._sharing = groups.expt_tp
        self._shares = dist.get_world_size(self._sharing)
        self.router = TopKRouter(config=config, pg_collection=groups)
        self.counted: torch.Tensor | None = None  # [T, 1] 1 for the tokens of a pass that are counted
        self.load: torch.Tensor
        """[E] tokens that went to each expert, of those that were counted in passes with a gradient."""
        self.register_buffer("load", torch.zeros(config.num_moe_experts, dtype=torch.int64), persistent=False)
        self.experts = Experts(config.num_moe_experts // self._ranks, config, self._shares)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            self.shared_experts = SharedExpertMLP(config, products, gate=False, pg_collection=groups)

    def set_layer_number(self, number: int) -> None:
        """Take the number of the layer, from 1, as the library gives it."""
        self.router.set_layer_number(number)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the experts of each token, [T, 1, H] as the input."""
        shares, there = self.router(hidden)  # [T, E] each
        if self.counted is not None and torch.is_grad_enabled():  # once, where a layer is computed again
            self.load += (there * self.counted).sum(0)
        chosen = there.byte().topk(self._chosen).indices
        order = chosen.flatten().argsort(stable=True)
        rows = _to_experts(hidden.flatten(0, 1), order, self._chosen)
        made = self._made(rows, there.sum(0), shares.gather(1, chosen).flatten().gather(0, order))
        found = _to_tokens(made, order, self._chosen).view_as(hidden)
        if self.shared_experts is not None:
            found = found + self.shared_experts(hidden)
        return found

    def _made(self, rows: torch.Tensor, counts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return what experts make of rows in their order, [N, H], wherever they are.

        Args:
            rows: [N, H].
            counts: [E] rows of each expert.
            shares: [N].
        """
        if self._ranks == 1:
            return self._summed(rows, counts, shares)
        return _elsewhere(self._group, rows, counts.view(self._ranks, -1), shares, self._summed)

    def _summed(self, rows: torch.Tensor, counts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return what experts of this rank make of rows: the sum over the ranks that share their channels."""
        if self._shares == 1:
            return self.experts(rows, counts, shares)  # type: ignore[no-any-return]
        each = counts.expand(self._shares, -1).contiguous()
        made = _elsewhere(self._sharing, rows.repeat(self._shares, 1), each, shares.repeat(self._shares), self.experts)
        return made.view(self._shares, *rows.shape).sum(0)


def _elsewhere(
    group: dist.ProcessGroup,
    rows: torch.Tensor,
    counts: torch.Tensor,
    shares: torch.Tensor,
    make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Let the ranks of a group make something of rows, each of those that it is sent.

    Args:
        rows: [N, H] those for the first rank first, ordered by expert.
        counts: [R, E of a rank] rows for each expert of each rank.
        shares: [N].
        make: as `ExpertMixture._made`.
    """
    given = torch.empty_like(counts)  # rows for each of this rank's experts, by the rank that sends them
    dist.all_to_all_single(given, counts, group=group)
    sent, received = torch.stack((counts.sum(1), given.sum(1))).tolist()  # one wait for the GPU, not two
    rows = all_to_all(group, rows, received, sent)
    shares = all_to_all(group, shares, received, sent)
    numbers = torch.arange(given.shape[1], device=rows.device).repeat(len(given))
    order = numbers.repeat_interleave(given.flatten(), output_size=sum(received)).argsort(stable=True)
    made = make(_to_experts(rows, order, 1), given.sum(0), shares.gather(0, order))
    return all_to_all(group, _to_tokens(made, order, 1), sent, received)  # type: ignore[no-any-return]


class _Replay:
    """The choice of experts as the library asks for it; it has the same, but keeps micro-batches in a queue."""

    def __init__(self, recorded: torch.Tensor | None) -> None:
        self._recorded = recorded
        self.taken: torch.Tensor | None = None  # [T, K] in the pass

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the chosen experts, [T, K], and these."""
        _, own = choose(scores, topk, num_groups=groups, group_topk=group_topk)
        chosen = self.taken = replayed(own, self._recorded)
        return scores.gather(1, chosen), chosen


class ExpertLayer(Layer):
    """A layer whose router receives the experts of each call: a layer that is recomputed in a backward pass gets the
    experts of its own micro-batch (docs/internals/routing-replay.md).
    """

    compiles_fed = False
    taken: torch.Tensor | None = None
    """[T of this rank, K] experts in the newest pass."""

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedDocuments, **given: Any
    ) -> tuple[torch.Tensor, None]:
        recorded = packed_seq_params.recorded
        replay = _Replay(None if recorded is None else recorded[:, self.layer_number - 1])
        self.mlp.router.router_replay, self.mlp.counted = replay, packed_seq_params.counted
        found = super().forward(hidden_states, packed_seq_params=packed_seq_params, **given)
        self.taken = replay.taken
        return found

    def fed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Layer`: by experts."""
        return self._added(self.mlp_bda, self.mlp(self.pre_mlp_layernorm(hidden)), hidden)

    def compile(self) -> None:
        """Compile the parts with as many tokens as the micro-batch, and the activation of experts."""
        experts = self.mlp.experts
        experts.opened = torch.compile(experts.opened, dynamic=True)
        super().compile()


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
            "moe_router_bias_update_rate": 0.0,  # it would move them before the gradient is known to be finite
            "moe_router_pre_softmax": False,
        }
    return options


class Corrections:
    """The biases that correct the scores of a model's experts, moved so that tokens are spread more evenly.

    Each expert that got more tokens than the mean of its layer loses the rate, each that got fewer gains it (arXiv
    2408.15664, algorithm 1). Token counts are exact, so every layout moves the biases equally.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate = rate
        mixtures = [one for one in model.modules() if isinstance(one, ExpertMixture)]
        self._mixtures = [one for one in mixtures if one.router.expert_bias is not None] if rate else []

    @property
    def moves(self) -> bool:
        """Return whether they do, on any stage."""
        return self._rate > 0.0

    def forget(self) -> None:
        """Forget which tokens went where."""
        for one in self._mixtures:
            one.load.zero_()

    def update(self) -> None:
        """Move them by the tokens of all ranks since the last `forget`."""
        if not self._mixtures:  # all ranks of a stage have the same layers
            return
        loads = torch.stack([one.load for one in self._mixtures])
        dist.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        below = (loads.sum(-1, keepdim=True) - loads * loads.shape[-1]).sign()
        for one, direction in zip(self._mixtures, below, strict=True):
            one.router.expert_bias.add_(direction * self._rate)


def keep_corrections(model: nn.Module) -> None:
    """Let the biases that correct scores stay in float32 in a model of another type."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()
