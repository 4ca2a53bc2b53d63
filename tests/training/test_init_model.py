"""A model that is made is the one of transformers: its files, and the names, kinds and values of its weights."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

from asyncrl.config.settings import Config, CreateModelSettings, ModelSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.training.init_model import ModelShape, create_configured, create_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=^ "
SHAPES = [ModelShape(), ModelShape(hidden=46, layers=3, heads=4, kv_heads=2, head_dim=10, ffn=81, context=96)]
VARIES = ("transformers_version", "_name_or_path")


@pytest.fixture(scope="module", params=SHAPES, ids=["default", "other"])
def pair(request, tmp_path_factory):
    """Directories of one shape, made here and by transformers."""
    folder, shape = tmp_path_factory.mktemp("models"), request.param
    create_model(folder / "ours", alphabet=ALPHABET, seed=3, shape=shape)
    config = Qwen3Config(
        vocab_size=len(ALPHABET) + 3,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    set_seed(3)
    Qwen3ForCausalLM(config).save_pretrained(folder / "theirs")
    generation = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, do_sample=True)
    generation.save_pretrained(folder / "theirs")
    return folder / "ours", folder / "theirs"


def test_the_configuration_is_that_of_transformers(pair):
    ours, theirs = (AutoConfig.from_pretrained(directory).to_dict() for directory in pair)
    for config in (ours, theirs):
        for name in VARIES:
            config.pop(name, None)
    assert ours == theirs


def test_the_generation_settings_are_those_of_transformers(pair):
    ours, theirs = (json.loads((directory / "generation_config.json").read_bytes()) for directory in pair)
    assert ours == {name: value for name, value in theirs.items() if name not in VARIES}


def test_the_parameters_have_the_names_sizes_and_kinds_of_transformers(pair):
    ours, theirs = (load_file(directory / "model.safetensors") for directory in pair)
    assert {name: (found.shape, found.dtype) for name, found in ours.items()} == {
        name: (found.shape, found.dtype) for name, found in theirs.items()
    }
    with safe_open(pair[0] / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers refuses the file


def test_the_weights_are_those_that_transformers_draws_from_the_seed(pair):
    ours, theirs = (load_file(directory / "model.safetensors") for directory in pair)
    for name, found in ours.items():
        assert np.abs(found - theirs[name]).max() < 1e-7, name  # theirs are rounded to float32 on the way
    assert ours["model.norm.weight"].tolist() == [1.0] * len(ours["model.norm.weight"])
    assert not ours["model.embed_tokens.weight"][0].any()  # of padding
    drawn = ours["model.layers.0.mlp.up_proj.weight"]
    assert abs(drawn.std() - 0.02) < 5 * 0.02 / np.sqrt(2 * drawn.size)


def test_transformers_loads_every_weight_as_it_is_written(pair):
    loaded = AutoModelForCausalLM.from_pretrained(pair[0]).state_dict()
    written = load_file(pair[0] / "model.safetensors")
    assert loaded.keys() == written.keys()
    assert all(np.array_equal(loaded[name].numpy(), values) for name, values in written.items())


def test_a_config_describes_the_model_that_is_made(tmp_path):
    create = CreateModelSettings(hidden=16, layers=1, heads=1, head_dim=8, ffn=24, context=40, alphabet="ab")
    create_configured(tmp_path / "configured", Config(seed=9, model=ModelSettings(create=create)))
    create_model(tmp_path / "given", alphabet="ab", seed=9, shape=ModelShape(16, 1, 1, 1, 8, 24, 40))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "configured" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()


def test_a_made_model_holds_conversations_where_it_has_a_template(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    create = CreateModelSettings(alphabet="ab", template=template)
    create_configured(tmp_path / "made", Config(model=ModelSettings(create=create)))

    tokenizer = TaskTokenizer.load(tmp_path / "made")

    assert tokenizer.special == ["<pad>", "<bos>", "<eos>"]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ab"}]
    assert tokenizer.chat_text(said) == "ab<eos>ab"
