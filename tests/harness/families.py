"""Small random models of families that no list of asyncrl names, as transformers makes and stores them."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from harness.mixtures import write_random_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    }
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FAMILIES = {
    "qwen3.5": ("qwen3_5_text", {**_LINEAR, **_SECTIONS}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_LINEAR, **_SECTIONS, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-next": ("qwen3_next", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "glm-4.7-flash": ("glm4_moe_lite", {**_ROUTED, **_LATENT}),
    "deepseek-v3.2": (
        "deepseek_v32",
        {**_ROUTED, **_LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "gpt-oss": ("gpt_oss", {**_LOCAL, **_SLIDING}),
    "gemma-3": ("gemma3_text", _SLIDING),
    "gemma-4": ("gemma4_text", {**_SLIDING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}),
    "minimax-m2": ("minimax_m2", _LOCAL),
    "nemotron-3": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            **_ROUTED,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "phi-4": ("phi3", {}),
    "mistral-3": ("ministral3", {}),
    "olmo-3": ("olmo3", _SLIDING),
}
"""By name: the type that transformers gives the model, and what differs from `SHAPE`."""


def write_family(directory, name):
    """Write a model whose norms, biases and states are not what they begin as, with a tokenizer."""
    kind, options = FAMILIES[name]
    values = {**SHAPE, **options}
    if kind == "nemotron_h":
        values.pop("num_hidden_layers")
    return write_random_model(directory, AutoConfig.for_model(kind, **values), context=128)


def change_config(directory, **changes):
    """Change `config.json` of a model."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def write_with_images(directory, name="qwen3.5"):
    """Write a family's model as the language model of one with images, and with a layer that predicts ahead."""
    write_family(directory, name)
    text = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    own = {key.replace("model.", "model.language_model.", 1): one for key, one in tensors.items()}
    further = {"model.visual.patch_embed.proj.weight": torch.randn(8, 3), "mtp.fc.weight": torch.randn(32, 64)}
    save_file({**own, **further}, directory / "model.safetensors", {"format": "pt"})
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole))
    return further
