"""A layer as one function that can be compiled: the library's waits, warns and branches between its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.linear_precision import Multiply
from asyncrl.training.megatron.mla import LatentAttention


class Layer(TransformerLayer):  # type: ignore[misc]
    """The library's modules in the order of its own `forward`, for documents and without dropout."""

    compiles_attended = True  # attention
    compiles_fed = True  # the part after it
    multiply: Multiply = staticmethod(F.linear)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        packed_seq_params: PackedDocuments,
        rotary_pos_emb: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            hidden_states: [T of this rank, 1, H].
            packed_seq_params: the documents.
            rotary_pos_emb: [T, 1, 1, D] angles; none where attention has a latent.

        Returns:
            As `hidden_states`, and no context.
        """
        return self.fed(self.attended(hidden_states, packed_seq_params, rotary_pos_emb)), None

    def attended(self, hidden: torch.Tensor, documents: PackedDocuments, angles: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states with what attention adds."""
        if angles is None:
            return self._forward_attention(hidden, packed_seq_params=documents)[0]  # type: ignore[no-any-return]
        attention = self.self_attention
        groups, size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        heads = attention.num_attention_heads_per_partition
        mixed = self._product(attention.linear_qkv, self.input_layernorm(hidden))
        by_group = mixed.view(len(angles), groups, -1, size)
        queries, key, value = torch.split(by_group, [by_group.shape[2] - 2, 1, 1], 2)
        key, gate = key.reshape(-1, 1, groups, size), None
        if self.config.attention_output_gate:  # each head has its gate after its query
            query, gate = queries.reshape(-1, 1, heads, 2, size).unbind(-2)
        else:
            query = queries.reshape(-1, 1, heads, size)
        if attention.q_layernorm is not None:
            query, key = attention.q_layernorm(query), attention.k_layernorm(key)
        turned = (_apply_rotary_pos_emb_bshd(one, angles, self.config.rotary_interleaved) for one in (query, key))
        found = attention.core_attention(*turned, value.transpose(1, 2), None, packed_seq_params=documents)
        if gate is not None:
            found = found * gate.flatten(-2).sigmoid()
        return self._added(self.self_attn_bda, self._product(attention.linear_proj, found), hidden)

    def fed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with what the feed-forward layer adds."""
        gate, up = self._product(self.mlp.linear_fc1, self.pre_mlp_layernorm(hidden)).chunk(2, -1)
        return self._added(self.mlp_bda, self._product(self.mlp.linear_fc2, F.silu(gate) * up), hidden)

    def compile(self) -> None:
        """Let the layer be compiled at its first pass; neither attention that reads a latent nor delta nets are."""
        whole = self.compiles_attended and not isinstance(self.self_attention, LatentAttention)
        names = ["attended"] if whole else []
        if self.compiles_fed:
            names = ["forward"] if names else ["fed"]
        for name in names:
            setattr(self, name, torch.compile(getattr(self, name)))

    def _product(self, linear: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return what one of the library's modules makes, with its bias."""
        if self.config.tensor_model_parallel_size > 1:
            found: torch.Tensor = _exchanged(self._multiplied, linear, hidden)
            return found
        return self._multiplied(linear, hidden, linear.bias)

    def _multiplied(self, linear: Any, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product of what this rank has, with its adapter."""
        made, adapter = self.multiply(hidden, linear.weight, bias), getattr(linear, "adapter", None)
        return made if adapter is None else made + adapter(hidden)

    def _added(self, addition: Any, made: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = addition(self.training, False)((made, None), hidden, 0.0)
        return found


def _exchanged(multiply: Callable[..., torch.Tensor], linear: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return what a module makes that tensor-parallel ranks share, each of which has a part of the tokens.

    The library exchanges them outside what can be compiled: then each layer is many small graphs.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if isinstance(linear, ColumnParallelLinear):
        return multiply(linear, all_gather_tensor_autograd(hidden, 0, group), linear.bias)
    made: torch.Tensor = reduce_scatter_tensor_autograd(multiply(linear, hidden), "sum", 0, group)
    return made if linear.bias is None else made + linear.bias
