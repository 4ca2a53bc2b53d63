"""Small models with experts, and rows that were routed."""

import dataclasses

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.training.create import write_tokenizer

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


def write_transformers_model(directory, kind, options):
    """A model whose biases and norms are not what they begin as."""
    config = AutoConfig.for_model(kind, **(SHAPE | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    write_tokenizer(directory, ALPHABET, context=64)


def routed_rows(rows, seed):
    """Rows whose tokens went to experts by chance; of each fifth token it is not known."""
    rng = np.random.default_rng(seed)
    found = []
    for row in rows:
        shape = len(row.tokens), SHAPE["num_hidden_layers"], MIXTURE["num_experts"]
        chosen = rng.random(shape).argsort(-1)[..., : MIXTURE["num_experts_per_tok"]].astype(np.uint8)
        chosen[rng.random(len(row.tokens)) < 0.2] = 0
        found.append(dataclasses.replace(row, routing=chosen.reshape(len(row.tokens), -1)))
    return found
