"""Models of the shapes that are measured, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.tensors import HostTensor, write_tensors


class Shape(NamedTuple):
    """A Qwen3 model, and the rows of a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int = 128


SHAPES = {
    "tiny": Shape(64, 2, 2, 1, 192, 40, 32),
    "67m": Shape(512, 13, 8, 4, 2048, 32_768, 64),
    "0.6b": Shape(1024, 28, 16, 8, 3072, 151_936),
    "4b": Shape(2560, 36, 32, 8, 9728, 151_936),
}


def write_random_model(directory: Path, shape: Shape, *, context: int, dtype: str = "bfloat16") -> list[HostTensor]:
    """Write a model of that shape with random weights; returns them."""
    config: Any = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    directory.mkdir()
    config.save_pretrained(directory)
    with torch.device("meta"):
        named = dict(Qwen3ForCausalLM(config).named_parameters())
    kind = getattr(torch, dtype)
    noise = (torch.randn(1 << 24) * 0.02).to(kind)
    tensors = []
    for name, parameter in named.items():
        count = parameter.numel()
        values = torch.ones(count, dtype=kind) if "norm" in name else noise.repeat(-(-count // len(noise)))
        content = values[:count].view(torch.uint8).numpy()
        tensors.append(HostTensor(name, dtype, list(parameter.shape), content))
    write_tensors(DiskFolder(directory), {"model": tensors})
    return tensors
