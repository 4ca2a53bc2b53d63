"""Adapters (LoRA) of families: which layers have them, and that published weights contain them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.data.model_dir import ModelError
from asyncrl.training.lora import Lora
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import write_model
from harness.families import write_family
from harness.training import policy, policy_rows, save

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "out_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
TARGETS = {
    "qwen3.5": (*DENSE, *DELTA_NET),
    "qwen3.5-moe": (*DENSE, *DELTA_NET, "experts"),
    "qwen3-next": (*DENSE, "in_proj_qkvz", "out_proj", "experts"),
    "glm-4.7-flash": (*LATENT, "gate_proj", "up_proj", "down_proj", "experts"),
    "deepseek-v3.2": (*LATENT, "gate_proj", "up_proj", "down_proj", "experts"),
    "gpt-oss": (*ATTENTION, "experts"),
    "gemma-3": DENSE,
    "gemma-4": DENSE,
    "minimax-m2": (*ATTENTION, "experts"),
    "nemotron-3": (*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj", "experts"),
    "phi-4": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mistral-3": DENSE,
    "olmo-3": DENSE,
}


def with_adapters(directory, targets):
    return TorchTrainer(directory, TorchSettings(lora=Lora(rank=2, alpha=4.0, targets=targets)))


def logits(network):
    network.set_attn_implementation("eager")
    with torch.no_grad():
        return network.eval()(input_ids=torch.arange(3, 27)[None], use_cache=False).logits


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_of_a_family_are_trained_and_in_the_published_weights(tmp_path, name):
    source = tmp_path / "model"
    write_family(source, name)
    trainer, rows = with_adapters(source, TARGETS[name]), policy_rows(np.random.default_rng(3), 6)
    network = trainer._policy.model
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    trained = {key for key, one in network.named_parameters() if one.requires_grad}

    for _ in range(2):
        assert trainer.step(rows, policy())["grad_norm"] > 0
    (tmp_path / "out").mkdir()
    write_model(DiskFolder(tmp_path / "out"), trainer.copy_weights().files(), trainer.source)

    adapted = {key.removesuffix("A") for key in trained if key.endswith("lora_A")}
    assert trained == {f"{key}{one}" for key in adapted for one in "AB"}
    parameters = dict(network.named_parameters())
    assert all(parameters[f"{key}B"].any() for key in adapted)
    trainer._policy.documents.release()
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(logits(published), logits(network), atol=2e-5)
    assert not torch.allclose(logits(published), logits(plain), atol=1e-3)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {key: one.shape for key, one in before.items()} == {key: one.shape for key, one in after.items()}
    routed = [key for key in before if ".experts." in key and before[key].ndim > 1 and "bias" not in key]
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert bool(changed & {*routed}) == ("experts" in TARGETS[name])


def test_adapters_of_experts_resume_with_the_same_bits(tmp_path):
    write_family(tmp_path / "model", "qwen3.5-moe")
    first, second = (with_adapters(tmp_path / "model", ("q_proj", "experts")) for _ in range(2))
    rows = policy_rows(np.random.default_rng(3), 6)
    first.step(rows, policy())
    (tmp_path / "saved").mkdir()
    save(first, tmp_path / "saved")

    second.load(tmp_path / "saved")
    for trainer in (first, second):
        trainer.step(rows, policy())

    both = [dict(trainer._policy.model.named_parameters()) for trainer in (first, second)]
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


def test_a_target_that_no_layer_has_is_refused_with_the_names_of_those_there_are(tmp_path):
    write_family(tmp_path / "model", "phi-4")

    with pytest.raises(ModelError, match="have no q_proj, expected some of down_proj, gate_up_proj, o_proj, qkv_proj"):
        with_adapters(tmp_path / "model", ("q_proj", "o_proj"))
