"""Make a small untrained model directory: for demos, tests and experiments from nothing.

The files are those that transformers writes, made without loading torch, which takes seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import SPECIAL_TOKENS

PAD, BOS, EOS = SPECIAL_TOKENS

_ROPE_THETA = 10_000.0
_STD = 0.02  # of the initial weights, `initializer_range` of Qwen3
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


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


def create_model(
    directory: Path, *, alphabet: str, seed: int, shape: ModelShape | None = None, template: str = ""
) -> None:
    """Write an untrained Qwen3 model with a character tokenizer as a Hugging Face directory.

    Args:
        directory: a new or empty directory.
        alphabet: the characters the tokenizer knows, one token each, without repeats.
        seed: of the weights, which are those that `torch.manual_seed` of it gives a model made by transformers.
        shape: sizes; `ModelShape()` where left out.
        template: its chat template; "" for none.

    Raises:
        ValueError: when the alphabet repeats a character.
        FileExistsError: when the directory holds anything.
    """
    shape = shape or ModelShape()
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} must hold at least one character, and each only once")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; a new model needs an empty directory")
    vocabulary = len(alphabet) + len(SPECIAL_TOKENS)
    _write_json(directory / "config.json", _config(shape, vocabulary))
    _write_json(directory / "generation_config.json", {**_IDS, "do_sample": True})
    save_file(_weights(shape, vocabulary, seed), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, alphabet, context=shape.context, template=template)


def create_configured(directory: Path, config: Config) -> None:
    """Write the untrained model that a config describes; see `create_model`."""
    create = config.model.create
    shape = ModelShape(**{name: getattr(create, name) for name in ModelShape.__dataclass_fields__})
    create_model(directory, alphabet=create.alphabet, seed=config.seed, shape=shape, template=create.template)


def _config(shape: ModelShape, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "layer_types": ["full_attention"] * shape.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": _STD,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "float32",
        **_IDS,
    }


def _parameters(shape: ModelShape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of the parameters, matrices as [out, in], in the order of their random numbers."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _EMBEDDING, (vocabulary, shape.hidden)
    for layer in range(shape.layers):
        for name, size in (
            ("self_attn.q_proj", (queries, shape.hidden)),
            ("self_attn.k_proj", (keys, shape.hidden)),
            ("self_attn.v_proj", (keys, shape.hidden)),
            ("self_attn.o_proj", (shape.hidden, queries)),
            ("self_attn.q_norm", (shape.head_dim,)),
            ("self_attn.k_norm", (shape.head_dim,)),
            ("mlp.gate_proj", (shape.ffn, shape.hidden)),
            ("mlp.up_proj", (shape.ffn, shape.hidden)),
            ("mlp.down_proj", (shape.hidden, shape.ffn)),
            ("input_layernorm", (shape.hidden,)),
            ("post_attention_layernorm", (shape.hidden,)),
        ):
            yield f"model.layers.{layer}.{name}.weight", size
    yield "model.norm.weight", (shape.hidden,)
    yield _HEAD, (vocabulary, shape.hidden)


def _weights(shape: ModelShape, vocabulary: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Draw matrices from N(0, 0.02), but 0 for the embedding of padding; a norm begins at 1."""
    random, sizes = TorchRandom(seed), dict(_parameters(shape, vocabulary))
    weights = {name: np.ones(size, np.float32) for name, size in sizes.items() if len(size) == 1}
    body = [name for name in sizes if name not in weights and name != _HEAD]
    for names in (body, [_HEAD]):
        for name in names:  # torch draws for a new layer what transformers then draws again
            (random.normal if name == _EMBEDDING else random.uniform)(math.prod(sizes[name]))
        for name in names:
            drawn = random.normal(math.prod(sizes[name])) * _STD
            weights[name] = drawn.astype(np.float32).reshape(sizes[name])
    weights[_EMBEDDING][_IDS["pad_token_id"]] = 0.0
    return weights


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(directory: Path, alphabet: str, *, context: int, template: str = "") -> None:
    """Write the tokenizer of such a model: ids 0 to 2 pad, begin and end, then a token for each character."""
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    # Without an unknown token a character outside the alphabet is an error, not silently another token.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", settings)


Floats = npt.NDArray[np.float64]

_BLOCK = 16  # numbers that torch turns from uniform to normal at once


class TorchRandom:
    """The generator of torch on a CPU: the Mersenne Twister of 32 bits."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed & 0xFFFFFFFF)

    def uniform(self, count: int) -> Floats:
        """Return `Tensor.uniform_()` of `count` float32 numbers: multiples of 2^-24 in [0, 1)."""
        return self._bits.randint(0, 1 << 32, count, np.uint32) % (1 << 24) / float(1 << 24)

    def normal(self, count: int) -> Floats:
        """Return `Tensor.normal_()` of `count` float32 numbers, up to their rounding; from 16 on, as torch does.

        Source: Box and Muller, Annals of Mathematical Statistics 29 (1958).
        """
        values, whole = self.uniform(max(count, _BLOCK)), count // _BLOCK * _BLOCK
        values[:whole] = _box_muller(values[:whole])
        if whole < count:
            values[-_BLOCK:] = _box_muller(self.uniform(_BLOCK))  # torch draws the last block again
        return values[:count]


def _box_muller(uniform: Floats) -> Floats:
    """Turn blocks of 16 uniform numbers into normal ones: 8 radii, then their 8 angles."""
    radii, angles = np.moveaxis(uniform.reshape(-1, 2, _BLOCK // 2), 1, 0)
    radii, angles = np.sqrt(-2 * np.log1p(-radii)), 2 * np.pi * angles
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1).ravel()
