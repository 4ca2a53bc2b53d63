"""Small models with experts, and rows that were routed."""

import dataclasses
import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.training.disk_names import stored
from asyncrl.training.init_model import write_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz=!"  # with three more tokens a number that is odd: ranks have rows of none
SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}

_CORRECTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-4,
}
_LATENT = {
    **_CORRECTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_DELTA_NETS = {
    "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
SMALL = {
    "qwen3": ("qwen3", {"num_hidden_layers": 5}),  # which stages cannot have as many of
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"rope_parameters": _STRETCHED}),
    "qwen3-moe": ("qwen3_moe", MIXTURE),
    "glm4": ("glm4", {"pad_token_id": None}),
    "glm4-moe": ("glm4_moe", {**_CORRECTED, "use_qk_norm": True, "attention_bias": True}),
    "deepseek-v3": (
        "deepseek_v3",
        {**_LATENT, **GROUPS, "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "moonlight": ("deepseek_v3", {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "qwen3.5": ("qwen3_5_text", _DELTA_NETS),
    "kimi-k2": ("deepseek_v3", {**_LATENT, "rope_parameters": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0}}),
}
"""Small models of each family: the type that transformers gives them, and what differs from `SHAPE`."""


def write_transformers_model(directory, kind, options):
    """A model whose biases and norms are not what they begin as."""
    write_random_model(directory, AutoConfig.for_model(kind, **(SHAPE | options)), context=64)


def write_random_model(directory, config, *, context):
    """Write a model of a configuration with random tensors, also where they begin equal, and a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in stored(model).values():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    write_tokenizer(directory, ALPHABET, context=context)
    return model


def write_model_ahead(directory, kind, options):
    """A model with a layer that predicts the token after the next one, as published models have it on disk."""
    layers = SHAPE["num_hidden_layers"]
    write_transformers_model(directory, kind, {**options, "num_hidden_layers": layers + 1})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors, hidden = load_file(directory / "model.safetensors"), SHAPE["hidden_size"]
    random, prefix = torch.Generator().manual_seed(1), f"model.layers.{layers}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{name}.weight"] = 1.0 + 0.1 * torch.randn(hidden, generator=random)
    tensors[f"{prefix}.eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=random)
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def routed_rows(rows, seed, experts=MIXTURE["num_experts"], chosen_of_each=MIXTURE["num_experts_per_tok"]):
    """Rows whose tokens went to experts by chance; of each fifth token it is not known."""
    rng = np.random.default_rng(seed)
    found = []
    for row in rows:
        shape = len(row.tokens), SHAPE["num_hidden_layers"], experts
        chosen = rng.random(shape).argsort(-1)[..., :chosen_of_each].astype(np.uint8)
        chosen[rng.random(len(row.tokens)) < 0.2] = 0
        routing = chosen.reshape(len(row.tokens), -1)
        found.append(dataclasses.replace(row, routing=routing, routed=routing.any(1)))
    return found
