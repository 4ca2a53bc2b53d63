"""A transformers model as a function from tokens to log-probabilities, on one device or sharded over many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging

# Logits above this many elements are computed again in the backward pass instead of being kept.
_KEPT_LOGITS = 1 << 26


class Policy(nn.Module):
    """Log-probabilities of chosen tokens, with the vocabulary projected at their positions only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.vocab_size: int = model.config.vocab_size
        self.context: int = model.config.max_position_embeddings

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score one padded micro-batch.

        Rows are padded on the right. Attention is causal, so no token sees the padding after it and no
        attention mask is needed.

        Args:
            tokens: [R, T] rows.
            positions: [N] flat indices into [R * T] of the tokens before the scored ones.
            targets: [N] scored tokens.
            temperatures: [N] sampling temperature of each.

        Returns:
            [N] log-probs in nats at the given temperatures, and [N] entropies without gradient, both float32.
        """
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, positions)
        rows = max(_KEPT_LOGITS // self.vocab_size, 1)
        if len(chosen) <= rows:
            return self._score(chosen, targets, temperatures)
        parts = zip(*(torch.split(tensor, rows) for tensor in (chosen, targets, temperatures)), strict=True)
        scores = [checkpoint(self._score, *part, use_reentrant=False) for part in parts]
        return torch.cat([logprobs for logprobs, _ in scores]), torch.cat([entropy for _, entropy in scores])

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.lm_head(hidden).float() / temperatures[:, None]
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def load_policy(directory: Path, *, device: torch.device, dtype: torch.dtype, recompute: bool) -> Policy:
    """Load a model with float32 master weights that computes in `dtype`.

    On CUDA, or where torch.distributed is initialised, parameters are sharded with FSDP2 over all ranks.

    Args:
        directory: Hugging Face model directory.
        device: where this process computes.
        dtype: of the matrix products; float32 or bfloat16.
        recompute: keep only layer inputs for the backward pass.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # it would be drawn into logs and reports
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model.to(device)
    if recompute:
        model.gradient_checkpointing_enable()
    policy = Policy(model).train()
    if device.type == "cuda" or dist.is_initialized():
        _shard(policy, device, dtype)
    return policy


def _shard(policy: Policy, device: torch.device, dtype: torch.dtype) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs keep their type: the temperatures and positions of rotary embeddings must not be rounded.
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
