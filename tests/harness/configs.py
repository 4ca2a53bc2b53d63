"""Configs of tests: written, loaded, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from asyncrl.config.load import ConfigError, LoadedConfig, Problem, load_config
from asyncrl.run.preflight import check_surroundings
from asyncrl.training.megatron.families import family_of

TWO_TASKS = """
run = "short"
tasks.words.source = "reverse"
tasks.words.options = { letters = 4 }
tasks.words.share = 2
tasks.sums.source = "sum"
tasks.sums.options = { digits = 1 }
"""
SOUND = "rollout.max_new_tokens = 11\n"


def problems(path: str, *overrides: str, files: bool = False) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides, further=check_surroundings if files else None)
    return caught.value.problems


def the_problem(path: str, *overrides: str, files: bool = False) -> Problem:
    (problem,) = problems(path, *overrides, files=files)
    return problem


def from_settings(*overrides: str) -> LoadedConfig:
    return load_config("demo", overrides=overrides)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 3,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 100,
    "eos_token_id": 2,
}


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a model directory has by its `config.json`."""
    family, shape = family_of(folder)
    return family.tensors(shape)


def made_model(folder: Path, **changes: Any) -> None:
    """A small model directory, one token for each `a`, whose config.json is then changed: None takes a key away."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    weights = {name: np.zeros(shape, np.float32) for name, shape in tensors_of(folder).items()}
    save_file(weights, folder / "model.safetensors")
    config = {key: value for key, value in (SHAPE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "<eos>": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
