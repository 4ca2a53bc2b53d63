"""Our own modules inside the library's layers: the library cannot pack rows without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.attention import document_attention
from asyncrl.training.context_parallel.allgather_attention import segment_attention
from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.delta_net import adapt_delta
from asyncrl.training.megatron.experts import ExpertLayer, ExpertMixture, expert_options, keep_corrections
from asyncrl.training.megatron.layers import Layer
from asyncrl.training.megatron.mcore_patches import OPTIONS
from asyncrl.training.megatron.mla import adapt_latent, latent_options
from asyncrl.training.megatron.mtp import MtpBlock
from asyncrl.training.megatron.norms import Norm
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.weight_map import Family


class DocumentAttention(nn.Module):
    """Attention within documents, as the library calls its core attention; see `asyncrl.training.attention`."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

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
            query: [T, 1, heads of this rank, D], or without the second dimension.
            key: as `query`, of key-value heads.
            value: as `key`, with its own D.

        Returns:
            [T, 1, heads * D of values].
        """
        query, key, value = (one.flatten(0, -3) for one in (query, key, value))
        segments = packed_seq_params.segments
        if segments is not None:
            return segment_attention(query, key, value, segments, scale=self._scale).flatten(1).unsqueeze(1)
        query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
        documents = packed_seq_params.documents
        attended = document_attention(None, query, key, value, None, documents=documents, scaling=self._scale)[0]
        return attended.squeeze(0).flatten(1).unsqueeze(1)


class Trunk(GPTModel):  # type: ignore[misc]
    """The library's model, whose last stage returns its hidden states: logits of all tokens are never held."""

    frequencies: torch.Tensor | None = None
    """[D / 2] radians per position; None if layers have their own rotary embeddings."""

    def _preprocess(self, *, packed_seq_params: PackedDocuments, **options: Any) -> tuple[Any, ...]:
        """Return embeddings and rotary angles, [T, 1, 1, D] for each token, and unused values."""
        embedded, _, *rest = super()._preprocess(**options)
        if embedded is not None:  # with the strides that what layers make has: they are compiled once
            embedded = embedded.flatten(1).unsqueeze(1)
            if torch.is_grad_enabled():  # else layers that are computed again have no gradient of their adapters
                embedded.requires_grad_()
        return embedded, self.angles(packed_seq_params.positions), *rest

    def angles(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the rotary angles of tokens by their places in documents, [T, 1, 1, D]."""
        if self.frequencies is None:
            return None
        self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        both = torch.stack((angles, angles), -1) if self.config.rotary_interleaved else torch.cat((angles, angles), -1)
        return both.flatten(1)[:, None, None]

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


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
    config = (MLATransformerConfig if shape.latent else TransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm or shape.latent is not None,
        add_qkv_bias=shape.has_qkv_bias,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_model_parallel_layout=_stages(layout, shape.layers) if layout.pipeline > 1 else None,
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
        expert_tensor_parallel_size=layout.expert_tensor,  # by default it would be that of other products
        **expert_options(shape, layout.expert),
        **latent_options(shape),
        **OPTIONS,
        **family.options,
    )
    chunks = [_chunk(config, family, shape, layout, number) for number in range(layout.virtual)]
    if values and chunks[-1].post_process:
        chunks[-1].output_layer = nn.Linear(shape.hidden, 1, bias=False, dtype=dtype)
        nn.init.zeros_(chunks[-1].output_layer.weight)
    return chunks


def _stages(layout: Layout, layers: int) -> list[list[str]]:
    """Return what each chunk holds, as the library names it."""
    stages = [["decoder"] * len(layout.layers_of(chunk, layers)) for chunk in range(layout.chunks)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _chunk(config: TransformerConfig, family: Family, shape: ModelConfig, layout: Layout, number: int) -> Trunk:
    ends = {"ignore_virtual": False, "vp_stage": number if layout.virtual > 1 else None}
    place = number * layout.pipeline + parallel_state.get_pipeline_model_parallel_rank()
    own = layout.layers_of(place, shape.layers)
    model = Trunk(
        config,
        TransformerBlockSubmodules([_layer(config, family, shape, layer) for layer in own], Norm),
        -(-shape.vocab_size // layout.tensor) * layout.tensor,  # the last rank may have rows of no token
        shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",
        vp_stage=ends["vp_stage"],
    )
    if shape.ahead and model.post_process:
        model.ahead = MtpBlock(config, _layer(config, family, shape, shape.layers), ends["vp_stage"])
    model.to(config.params_dtype)  # the norms too
    keep_corrections(model)
    if shape.latent is None:  # else each layer has its own
        model.frequencies = shape.rope.inverse_frequencies(shape.head_dim)
    return model


def _layer(config: TransformerConfig, family: Family, shape: ModelConfig, number: int) -> Any:
    """Return the library's specification of a layer, with modules of our own."""
    how = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": shape.latent is not None}
    layer = get_gpt_layer_local_spec(**how, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if shape.experts is not None and number >= shape.experts.dense_first:
        layer.module, layer.submodules.mlp = ExpertLayer, ExpertMixture
    else:
        layer.module = Layer
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = DocumentAttention
    if shape.latent is not None:
        adapt_latent(layer.submodules.self_attention)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if shape.delta is not None and shape.delta.layers[number]:
        adapt_delta(layer, shape.delta)
    family.adapt(layer, config)
    return layer
