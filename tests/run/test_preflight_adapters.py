"""Checks of adapters (LoRA) on models with routed experts."""

import msgspec
import pytest

from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.trainers import trainer_kind
from asyncrl.run.preflight_model import check_adapters
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.lora_rows import adapter_problem
from harness.mixtures import SMALL, write_transformers_model


def test_adapters_beside_routed_experts_alone_are_refused(tmp_path):
    given = {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    config = msgspec.convert({"model": {"path": "model"}, "learner": given}, Config)
    for kind in ("glm4-moe", "qwen3-moe"):
        write_transformers_model(tmp_path / kind / "model", *SMALL[kind])

    assert not [*check_adapters(config, tmp_path / "glm4-moe")]  # beside its shared experts, and layers without any
    [found] = check_adapters(config, tmp_path / "qwen3-moe")
    assert "have no down_proj that an adapter can adapt" in found.message
    assert "of experts, k_proj, o_proj, q_proj, v_proj" in found.message


def test_adapters_of_experts_are_not_published_alone(tmp_path):
    write_transformers_model(tmp_path / "model", *SMALL["qwen3-moe"])
    lora = {"rank": 4, "targets": ["q_proj", "experts"]}
    config = msgspec.convert({"model": {"path": "model"}, "learner": {"lora": lora}}, Config)
    assert not [*check_adapters(config, tmp_path)]

    given = {"lora": {**lora, "publish": "adapter"}}
    [found] = check_adapters(msgspec.convert({"model": {"path": "model"}, "learner": given}, Config), tmp_path)
    assert "engines add no adapters to routed experts" in found.message


@pytest.mark.parametrize(
    ("trainer", "given", "words"),
    [
        ("torch", {"ranks": 2}, "adapters of experts are on one rank, found learner.ranks = 2"),
        ("megatron", {"ranks": 2, "layout": {"expert_tensor": 2}}, "ranks do not share the adapters of an expert"),
        ("megatron", {"router_bias_rate": 0.1}, "only adapters are trained"),
    ],
)
def test_adapters_of_experts_that_a_trainer_cannot_train_are_refused(trainer, given, words):
    lora = {"rank": 4, "targets": ["q_proj", "experts"]}
    settings = msgspec.convert({**given, "trainer": trainer, "lora": lora}, LearnerSettings)

    [found] = trainer_kind(trainer).checks(settings)

    assert words in found.message


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        ("deepseek-v3", "o_proj", "adapts no o_proj of model.layers.0.self_attn.o_proj.weight, expected some of down"),
        ("glm4-moe", "up_proj", "adapts no up_proj of model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("qwen3-moe", "up_proj", "the layers have no up_proj, expected some of experts, k_proj, o_proj"),
    ],
)
def test_products_of_the_library_take_no_adapters(tmp_path, kind, target, words):
    write_transformers_model(tmp_path / kind, *SMALL[kind])

    assert words in adapter_problem(*read_family(tmp_path / kind), ["experts", target])
    assert not adapter_problem(*read_family(tmp_path / kind), ["experts"])
