"""Modules of our own inside the library's layers: what it has without Transformer Engine knows no packed rows."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.attention import document_attention
from asyncrl.training.megatron.around import OPTIONS
from asyncrl.training.megatron.context import PackedDocuments, segment_attention
from asyncrl.training.megatron.experts import EXPERTS, ExpertLayer
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.megatron.table import Family


class Norm(nn.RMSNorm):
    """RMSNorm as the library calls it; its own refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # then each rank's gradient is of its own tokens


class DocumentAttention(nn.Module):
    """Attention within documents, as the library calls its core attention; see `asyncrl.training.attention`."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: Any,
        *,
        packed_seq_params: PackedDocuments,
        **_: Any,
    ) -> torch.Tensor:
        """
        Args:
            query: [T, heads of this rank, D].
            key: [T, key-value heads of this rank, D].
            value: as `key`.

        Returns:
            [T, 1, heads * D].
        """
        if packed_seq_params.segments is not None:
            return segment_attention(query, key, value, packed_seq_params.segments).flatten(1).unsqueeze(1)
        query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
        attended = document_attention(None, query, key, value, None, documents=packed_seq_params.documents)[0]
        return attended.squeeze(0).flatten(1).unsqueeze(1)


class Trunk(GPTModel):  # type: ignore[misc]
    """The library's model, whose last stage returns its hidden states: logits of all tokens are never held."""

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def _expert_options(shape: ModelConfig, layout: Layout) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_pre_softmax": not experts.normalised,  # else the shares are those among the chosen experts
        "expert_model_parallel_size": layout.expert,
    }


def build(
    family: Family,
    shape: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    values: bool = False,
) -> list[Trunk]:
    """Make the chunks of layers of this rank's stage, without weights.

    Args:
        layout: whose groups are formed, see `around.join`.
        dtype: of the weights and products.
        recompute: keep only the inputs of layers for the backward pass.
        values: let the head give one number, which is 0 at first.
    """
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        batch_p2p_comm=layout.virtual == 1,
        overlap_p2p_comm=layout.virtual > 1,  # else two stages of several chunks mix their gradients up, in silence
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_expert_options(shape, layout),
        **OPTIONS,
        **family.options,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if shape.experts is not None:
        layer.module, layer.submodules.mlp = ExpertLayer, EXPERTS
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = DocumentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    chunks = [_chunk(config, layer, shape, layout, number) for number in range(layout.virtual)]
    if values and chunks[-1].post_process:
        chunks[-1].output_layer = nn.Linear(shape.hidden, 1, bias=False, dtype=dtype)
        nn.init.zeros_(chunks[-1].output_layer.weight)
    return chunks


def _chunk(config: TransformerConfig, layer: Any, shape: ModelConfig, layout: Layout, number: int) -> Trunk:
    ends = {"ignore_virtual": False, "vp_stage": number if layout.virtual > 1 else None}
    model = Trunk(
        config,
        TransformerBlockSubmodules([layer] * (shape.layers // layout.chunks), Norm),
        -(-shape.vocab_size // layout.tensor) * layout.tensor,  # the last rank may have rows of no token
        shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=ends["vp_stage"],
    )
    model.to(config.params_dtype)  # the norms too
    model.rotary_pos_emb.inv_freq = shape.rope.inverse_frequencies(shape.head_dim)
    return model
