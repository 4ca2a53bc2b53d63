"""Make a small untrained model directory: for demos, tests and experiments from nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.settings import Config

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
"""Tokens 0, 1 and 2; the alphabet follows."""

_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen3 model; the defaults have about 104k parameters with an alphabet of 40."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    ffn: int = 192
    context: int = 64  # largest number of tokens


def create_model(directory: Path, *, alphabet: str, seed: int, shape: ModelShape | None = None) -> None:
    """Write an untrained Qwen3 model with a character tokenizer as a Hugging Face directory.

    Args:
        directory: a new or empty directory.
        alphabet: the characters the tokenizer knows, one token each, without repeats.
        seed: of the weights; the same seed gives the same bytes.
        shape: sizes; `ModelShape()` where left out.

    Raises:
        ValueError: when the alphabet repeats a character.
        FileExistsError: when the directory holds anything.
    """
    shape = shape or ModelShape()
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} must hold at least one character, and each only once")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; a new model needs a directory of its own")
    config = Qwen3Config(
        vocab_size=len(alphabet) + 3,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=False,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    generation: Any = GenerationConfig
    generation(pad_token_id=0, bos_token_id=1, eos_token_id=2, do_sample=True).save_pretrained(directory)
    write_tokenizer(directory, alphabet, context=shape.context)


def write_tokenizer(directory: Path, alphabet: str, *, context: int) -> None:
    """Write the tokenizer of such a model: ids 0 to 2 pad, begin and end, then a token for each character."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    # Without an unknown token a character outside the alphabet is an error, not silently another token.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """`python -m asyncrl.training.create CONFIG.json DIRECTORY`: the model that a config describes."""
    config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Config)
    create = config.model.create
    fields = {name: getattr(create, name) for name in ModelShape.__dataclass_fields__}
    create_model(Path(arguments[1]), alphabet=create.alphabet, seed=config.seed, shape=ModelShape(**fields))


if __name__ == "__main__":
    main(sys.argv[1:])
