"""Models of the measured shapes, with random weights."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.config.engine_settings import Capability, kind_of
from asyncrl.training.disk_names import DiskNames
from asyncrl.training.init_model import write_tokenizer
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
    experts: tuple[int, int, int] | None = None  # number of experts, active experts of a token, channels of one expert


SHAPES = {
    "tiny": Shape(64, 2, 2, 1, 192, 40, 32),
    "67m": Shape(512, 13, 8, 4, 2048, 32_768, 64),
    "0.6b": Shape(1024, 28, 16, 8, 3072, 151_936),
    "4b": Shape(2560, 36, 32, 8, 9728, 151_936),
    "tiny-moe": Shape(64, 2, 2, 2, 192, 40, 32, (8, 2, 32)),
    "30b-a3b": Shape(2048, 48, 32, 4, 6144, 151_936, 128, (128, 8, 768)),
}


def write_random_model(directory: Path, shape: Shape, *, context: int, dtype: str = "bfloat16") -> list[HostTensor]:
    """Write a model of this shape with random weights; return them."""
    mixture = shape.experts
    kinds: dict[bool, Any] = {False: (Qwen3Config, Qwen3ForCausalLM), True: (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
    config_kind, model_kind = kinds[mixture is not None]
    options = dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), mixture or (), strict=False))
    config: Any = config_kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=context,
        tie_word_embeddings=mixture is None,
        norm_topk_prob=True,
        dtype=dtype,
        **options,
    )
    config.architectures = [model_kind.__name__]
    directory.mkdir()
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = model_kind(config)
    named, names = dict(model.named_parameters()), DiskNames.of(model)
    kind = getattr(torch, dtype)
    noise = (torch.randn(1 << 24) * 0.02).to(kind)
    tensors = []
    shapes = [part for name, one in named.items() for part in names.shapes(name, tuple(one.shape)).items()]
    for name, size in shapes:
        count = math.prod(size)
        # Separate memory: a change of one tensor changes no other tensor.
        drawn = noise[:count].clone() if count <= len(noise) else noise.repeat(-(-count // len(noise)))
        values = torch.ones(count, dtype=kind) if "norm" in name else drawn[:count]
        tensors.append(HostTensor(name, dtype, list(size), values.view(torch.uint8).numpy()))
    write_tensors(DiskFolder(directory), {"model": tensors})
    return tensors


def dtype_of(kind: str) -> str:
    """Return the type in which servers of a kind compute."""
    return "bfloat16" if Capability.GPU in kind_of(kind).capabilities else "float32"


_ALPHABET = "abcdefghijklmnopqrstuvwxyz=^"


class Served(NamedTuple):
    """A server to start, and its model."""

    kind: str  # "embedded" or "sglang"
    shape: str  # of its model, random weights
    arguments: str  # of SGLang, as on a command line
    pythonpath: str  # folders from which it is imported; "" for none
    layers: int = 0  # of the model; 0 for as many as the shape has

    def write_model(self, directory: Path, *, context: int, dtype: str) -> None:
        """Write the model, with a tokenizer of letters."""
        shape = SHAPES[self.shape]
        write_random_model(directory, shape._replace(layers=self.layers or shape.layers), context=context, dtype=dtype)
        write_tokenizer(directory, _ALPHABET, context=context)

    def table(self, running: int, further: Sequence[str] = ()) -> dict[str, Any]:
        """Return the table `engine` of a config.

        Args:
            running: concurrent requests.
            further: more arguments of SGLang, after the others.
        """
        return {
            "kind": self.kind,
            "max_running": running,
            "arguments": [*shlex.split(self.arguments), *further],
            "environment": {"PYTHONPATH": self.pythonpath} if self.pythonpath else {},
        }
