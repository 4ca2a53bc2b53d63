"""Checks of the megatron trainer before anything is loaded."""

import json
import re

import pytest

from asyncrl.config.load import load_config
from asyncrl.training import vocabulary
from asyncrl.training.megatron import memory, preflight
from harness.configs import problems, the_problem
from harness.models import made_model

MEGATRON = "learner.trainer=megatron"


@pytest.mark.parametrize(("found", "named"), [("", "no package"), ("0.17.0", "0.17.0")])
def test_a_library_that_is_missing_or_another_is_one_clear_error(monkeypatch, found, named):
    monkeypatch.setattr(preflight, "_installed", lambda _: found)

    problem = the_problem("demo", MEGATRON, files=True)

    assert "learner.trainer" in problem.key
    assert f'found {named}, "megatron" needs megatron-core 0.16.1; install it' in problem.message


def test_products_in_fp8_need_transformer_engine(monkeypatch):
    there = preflight.VERSION, ""
    monkeypatch.setattr(preflight, "_installed", lambda package: there[package == "transformer-engine"])

    found = problems("demo", MEGATRON, "learner.dtype=fp8", "learner.device=cuda", files=True)

    (problem,) = [one for one in found if "transformer-engine" in one.message]  # the GPU is missing, too
    assert "learner.dtype" in problem.key
    assert 'found no package transformer-engine, "fp8" needs it' in problem.message


@pytest.mark.parametrize(
    ("layout", "ranks", "words"),
    [
        ("tensor=2", 2, "tensor = 2 does not divide the model's 1 key-value heads; use a divisor of 1"),
        ("virtual=2", 1, "virtual = 2 divides the layers of several stages, found pipeline = 1; raise pipeline"),
        ("expert=2", 2, "expert = 2 does not divide the model's 0 experts; set it to 1"),
        ("expert_tensor=2", 2, "expert_tensor = 2 does not divide the 0 channels of an expert; set it to 1"),
        ("head=1", 1, "head = 1 spreads layers over stages, found pipeline = 1; raise pipeline, or set 0"),
        ("pipeline=2 head=2", 2, "head = 2 leaves 0 of the model's 2 layers to the last of 2 chunks; use a smaller"),
        ("pipeline=3", 3, "pipeline = 3 is more than the model's 2 layers; each chunk has one at least: use 2 at most"),
    ],
)
@pytest.mark.parametrize("created", [True, False])
def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path, layout, ranks, words, created):
    model = [] if created else [f"model.path={made_model(tmp_path)}"]

    given = [f"learner.layout.{one}" for one in layout.split()]

    problem = the_problem("demo", MEGATRON, *given, f"learner.ranks={ranks}", *model, files=True)

    assert words in problem.message


def test_channels_and_tokens_are_divided_too():
    create = ["learner.ranks=2", "learner.layout.tensor=2", "model.create.kv_heads=2", "model.create.ffn=191"]

    assert "191 feed-forward channels" in the_problem("demo", MEGATRON, *create, files=True).message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "has no family MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn', expected default"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]},
            "found mlp_only_layers = [0], expected []",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "found quantised weights (quantization_config: "),
        ({"attention_bias": True}, "attention_bias = True, expected False"),
    ],
)
def test_a_family_or_a_feature_that_is_not_known_is_refused_by_name(tmp_path, changed, words):
    file = made_model(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    assert any(words in one.message for one in problems("demo", MEGATRON, f"model.path={tmp_path}", files=True))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "mtp_weight=0.1",
            "there is no layer that predicts ahead: num_nextn_predict_layers in config.json, and model.l",
        ),
        ("router_bias_rate=0.001", "found no experts whose scores are corrected by biases"),
    ],
)
def test_what_the_model_lacks_cannot_be_trained(tmp_path, setting, words):
    model = f"model.path={made_model(tmp_path)}"

    assert words in the_problem("demo", MEGATRON, f"learner.{setting}", model, files=True).message


def test_the_memory_of_the_fullest_rank_is_estimated():
    sizes = ["model.create.hidden=1024", "model.create.ffn=4096", "model.create.kv_heads=2", "model.create.layers=16"]
    found = {}
    for name, layout, ranks in (
        ("one", [], 1),
        ("four", ["tensor=2", "pipeline=2"], 4),
        ("moments", [], 4),
        ("shared", ["context=2"], 2),
    ):
        given = [MEGATRON, f"learner.ranks={ranks}", *sizes, *(f"learner.layout.{one}" for one in layout)]
        loaded = load_config("demo", overrides=given)
        [line] = preflight.memory_lines(loaded.config, loaded.base)
        found[name] = {key: float(value) for key, value in re.findall(r"(\w+) ([\d.]+)[,)]", line)}

    for key in ("weights", "gradients", "optimizer"):
        assert found["one"][key] == pytest.approx(4 * found["four"][key], rel=0.05), key
    assert found["moments"]["optimizer"] == pytest.approx(found["one"]["optimizer"] / 4, rel=0.05)
    assert found["moments"]["gradients"] == found["one"]["gradients"]
    assert found["one"]["activations"] < found["shared"]["activations"] < 1.2 * found["one"]["activations"]


def test_the_estimate_counts_the_logits_that_are_held():
    assert memory.CHUNK_ELEMENTS == vocabulary.CHUNK_ELEMENTS
