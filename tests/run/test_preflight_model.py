"""Checks of a model, its rows, the functions and the machine before anything is loaded."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from asyncrl.config.load import load_config
from asyncrl.data.model_dir import tensor_shapes
from asyncrl.run.preflight import check_surroundings
from asyncrl.training.init_model import create_model
from harness.configs import SHAPE, SOUND, made_model, problems, tensors_of, the_problem

OWN = "model.path = '.'\nrollout.max_new_tokens = 9\ntask.source = 'rows.jsonl'\n"
ROW = {"prompt": "aa", "label": "a"}


@pytest.fixture
def rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")


# The model


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_of_a_shape_are_those_that_transformers_makes(tmp_path, architecture, tied):
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    shape = {key: value for key, value in SHAPE.items() if key != "architectures"} | {"head_dim": 4}
    config = getattr(transformers, f"{family}Config")(**shape, tie_word_embeddings=tied)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)

    assert tensor_shapes(tmp_path) == tensors_of(tmp_path)


def test_a_whole_model_is_found_whole(rows, written, tmp_path):
    made_model(tmp_path)

    assert load_config(written(OWN + "warmup.steps = 1\n"), further=check_surroundings).base == tmp_path


def test_a_teacher_with_another_tokenizer_is_refused(rows, written, tmp_path):
    made_model(tmp_path)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    made_model(teacher)
    config = written(OWN + "learner.teacher.model = 'teacher'\n")
    load_config(config, further=check_surroundings)

    tokenizer = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(tokenizer.replace('"a":1', '"b":1').replace('"a": 1', '"b": 1'))
    problem = the_problem(config, files=True)
    assert problem.key == "learner.teacher.model"
    assert "teacher: token 1 is 'b', of the trained model it is 'a'; it must have the" in problem.message
    critic = written(OWN + "learner.advantage = 'gae'\nlearner.critic.model = 'teacher'\n")
    assert the_problem(critic, files=True).message == problem.message
    (teacher / "model.safetensors").unlink()
    assert "model.safetensors holds no whole weights" in the_problem(critic, files=True).message


@pytest.mark.parametrize("table", ["teacher", "critic"])
def test_a_further_model_that_takes_shorter_rows_is_refused(rows, written, tmp_path, table):
    made_model(tmp_path)
    (tmp_path / "other").mkdir()
    made_model(tmp_path / "other")
    shape = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 9}))
    text = OWN + f"learner.{table}.model = 'other'\n" + ("learner.advantage = 'gae'\n" if table == "critic" else "")

    problem = the_problem(written(text), files=True)
    assert problem.key == f"learner.{table}.model"
    assert re.search(r"a row would take 10 tokens, but the model at .*other takes 9; lower", problem.message)
    load_config(written(text.replace("max_new_tokens = 9", "max_new_tokens = 8")), further=check_surroundings)


@pytest.mark.parametrize("table", ["teacher", "critic"])
def test_a_further_model_whose_weights_are_of_another_shape_is_refused(rows, written, tmp_path, table):
    made_model(tmp_path)
    (tmp_path / "other").mkdir()
    made_model(tmp_path / "other", intermediate_size=13)
    text = OWN + f"learner.{table}.model = 'other'\n" + ("learner.advantage = 'gae'\n" if table == "critic" else "")

    problem = the_problem(written(text), files=True)

    assert problem.key == f"learner.{table}.model"
    assert "other: by config.json model.layers.0.mlp.gate_proj.weight is [13, 8], in the weights it" in problem.message


def test_a_critic_without_the_head_that_it_replaces_is_taken(rows, written, tmp_path):
    made_model(tmp_path)
    (tmp_path / "other").mkdir()
    made_model(tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if name != "lm_head.weight"}, file)
    text = OWN + "learner.critic.model = 'other'\nlearner.advantage = 'gae'\n"

    load_config(written(text), further=check_surroundings)


def test_adapters_beside_projections_that_the_model_has_not_are_refused(rows, written, tmp_path):
    made_model(tmp_path)
    config = written(OWN + "learner.lora.rank = 4\nlearner.lora.targets = ['q_proj', 'up_proj']\n")
    load_config(config, further=check_surroundings)

    weights = load_file(tmp_path / "model.safetensors")  # as a model of another family has them
    save_file(
        {name.replace("q_proj", "qkv_proj"): one for name, one in weights.items()}, tmp_path / "model.safetensors"
    )
    found = {one.key: one.message for one in problems(config, files=True)}["learner.lora.targets"]
    assert "have no q_proj that an adapter can adapt; expected some of " in found
    assert found.endswith(" of down_proj, gate_proj, k_proj, o_proj, qkv_proj, up_proj, v_proj")


def test_a_teacher_knows_the_characters_of_a_made_model(written, tmp_path):
    create_model(tmp_path / "other", alphabet="^=abc", seed=0)
    config = written(SOUND + "learner.teacher.model = 'other'\nmodel.create.alphabet = '^=acb'\ntask.source = 'sum'\n")
    (found,) = [one for one in problems(config, files=True) if one.key == "learner.teacher.model"]
    assert "other: token 6 is 'b', of the trained model it is 'c'" in found.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn'; the embedded engine serves default",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"attention_bias": True}, "attention_bias is True; the embedded engine serves only False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, 'serves only False; use engine.kind = "sglang" for others'),
        ({"num_attention_heads": None}, "config.json lacks 'num_attention_heads'"),
        ({"hidden_size": "wide"}, "config.json has a value that is no number of a model: invalid literal"),
        (
            {"intermediate_size": 13},
            "by config.json model.layers.0.mlp.gate_proj.weight is [13, 8], in the weights it is [12, 8]; they are of",
        ),
        (
            {"num_hidden_layers": 3},
            "by config.json model.layers.2.input_layernorm.weight is [8], in the weights it is m",
        ),
        ({"num_hidden_layers": 1}, "the weights hold model.layers.1.input_layernorm.weight, but by config.json there"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "by config.json model.layers.0.self_attn.q_proj.bias is [8], in the weights it is missing",
        ),
        ({"vocab_size": 4}, "by config.json model.embed_tokens.weight is [4, 8], in the weights it is [3, 8]"),
    ],
)
def test_a_model_that_cannot_be_served_or_is_not_its_config_is_refused(rows, written, tmp_path, changes, message):
    made_model(tmp_path, **changes)

    problem = the_problem(written(OWN), files=True)

    assert problem.key == "model.path"
    assert message in problem.message


@pytest.mark.parametrize(
    ("tied", "further", "message"),
    [
        (False, "model.layers.1.self_attn.q_proj.bias", "by config.json the layers have no such tensor"),
        (
            True,
            "lm_head.weight",
            "by config.json lm_head.weight is tied to the embedding, in the weights it is another",
        ),
    ],
)
def test_tensors_that_the_config_leaves_no_place_for_are_refused(rows, written, tmp_path, tied, further, message):
    made_model(tmp_path, tie_word_embeddings=tied)
    file, harmless = tmp_path / "model.safetensors", "model.layers.1.self_attn.rotary_emb.inv_freq"
    held = load_file(file)
    held |= {harmless: held["model.norm.weight"]} | (
        {"lm_head.weight": held["model.embed_tokens.weight"]} if tied else {}
    )
    save_file(held, file)
    assert load_config(written(OWN), further=check_surroundings).base == tmp_path
    save_file(held | {further: held["model.embed_tokens.weight"] + 1.0}, file)

    assert message in the_problem(written(OWN), files=True).message


def test_what_the_embedded_engine_does_not_serve_is_left_to_another(rows, written, tmp_path):
    made_model(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}, attention_bias=True, mlp_bias=True)
    held = load_file(file := tmp_path / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.up_proj"):
        held[f"model.layers.0.{name}.bias"] = held["model.norm.weight"] + 1.0
    save_file(held, file)
    other = "engine = { kind = 'external', addresses = ['http://there:1'] }\n"

    assert load_config(written(OWN + other), further=check_surroundings).config.engine.kind == "external"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(rows, written, tmp_path):
    made_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["b"] = 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    message = the_problem(written(OWN), files=True).message

    assert "the tokenizer has the token 'b' with id 3, the model has 3 tokens" in message


def test_a_model_that_cannot_end_an_answer_is_refused_where_a_warm_up_needs_the_end(rows, written, tmp_path):
    made_model(tmp_path, eos_token_id=None)
    path = written(OWN)

    load_config(path, further=check_surroundings)
    problem = the_problem(path, "warmup.steps=1", files=True)

    assert "names no eos_token; a supervised answer must end with one" in problem.message


def test_a_supervised_row_longer_than_the_context_is_refused(written, tmp_path):
    made_model(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a" * 50, "label": "a" * 50}) + "\n")
    path = written(OWN)

    load_config(path, further=check_surroundings)
    assert "has 101 tokens and at most 100 fit" in the_problem(path, "warmup.steps=1", files=True).message


def test_only_headers_are_read_and_torch_is_not_loaded(rows, written, tmp_path):
    made_model(tmp_path)
    code = (
        "import sys; from asyncrl.config.load import load_config; "
        "from asyncrl.run.preflight import check_surroundings; "
        f"load_config({written(OWN)!r}, further=check_surroundings); print(*sys.modules)"
    )

    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()

    assert not {"torch", "transformers"} & set(modules)


def test_a_damaged_file_that_two_checks_read_is_one_problem(rows, written, tmp_path):
    made_model(tmp_path)
    (tmp_path / "config.json").write_text("{")

    problem = the_problem(written(OWN), "seed=1", files=True)  # the only one

    assert "config.json is not a JSON object" in problem.message


# Functions

LOADED = {
    "def reward(completion, lable): ...": "asks for 'lable', did you mean 'label'; it may name completion, prompt",
    "def reward(a, b, /): ...": "asks for 'b'",
    "reward = 3": "'reward' is no function but int",
}
ROLLOUTS = {
    "def rollout(row, context): ...": "it is no async function; write async def rollout(row, context)",
    "async def rollout(row): ...": "it is called with a row and a context, and too many positional arguments",
    "async def rollout(row, context, *, depth): ...": "and missing a required argument: 'depth'",
}


@pytest.mark.parametrize(
    ("key", "code", "message"),
    [
        *(("reward.function", code, message) for code, message in LOADED.items()),
        *(("task.rollout", code, message) for code, message in ROLLOUTS.items()),
    ],
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused(written, tmp_path, key, code, message):
    (tmp_path / "my.py").write_text(code)
    name = key.partition(".")[0] if key.startswith("reward") else "rollout"

    problem = the_problem(written(SOUND), f"{key}={tmp_path}/my.py:{name}", files=True)

    assert problem.key == f"--set {key}"
    assert message in problem.message


def test_functions_that_can_be_called_are_accepted_in_any_form(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "import functools\n"
        "async def deep(row, context, depth): ...\n"
        "rollout = functools.partial(deep, depth=3)\n"
        "class Judge:\n"
        "    async def __call__(self, completion, label): ...\n"
        "reward = Judge()\n"
    )

    load_config(
        written(SOUND),
        overrides=["reward.function=my.py:reward", "task.rollout=my.py:rollout"],
        further=check_surroundings,
    )


def test_what_a_file_starts_at_its_import_holds_nobody_up(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'])\ndef reward(completion): ...\n"
    )
    began = time.monotonic()

    load_config(written(SOUND), overrides=["reward.function=my.py:reward"], further=check_surroundings)

    assert time.monotonic() - began < 900, "it did not wait for what sleeps for 1000 s"


@pytest.mark.skipif(importlib.util.find_spec("lighteval") is not None, reason="lighteval is installed")
def test_a_reward_whose_package_is_missing_is_refused_with_its_name():
    problem = the_problem("demo", "reward.function=ifeval", files=True)

    assert "the reward 'ifeval' needs the package lighteval, which is not installed" in problem.message


@pytest.mark.parametrize("function", ["http://", "https://[::1", "reasoning-gym:leg_count"])
def test_a_reward_that_is_nowhere_is_refused(function):
    problem = the_problem("demo", f"reward.function={function}", files=True)

    assert problem.key == "--set reward.function"
    assert "expected http://host:port/path" in problem.message or "close: leg_counting" in problem.message


def test_less_memory_than_python_takes_is_refused():
    assert "found 50 MB, Python alone takes 128" in the_problem("demo", "reward.memory_mb=50", files=True).message


def test_calls_of_many_completions_are_for_functions_of_ones_own(written, tmp_path):
    (tmp_path / "r.py").write_text("def reward(completion):\n    return [1.0] * len(completion)\n")
    config = written(SOUND + "task.source = 'sum'\n")
    assert "no reward is a function of yours" in the_problem(config, "reward.batch=8", files=True).message
    own = written(SOUND + "task.source = 'sum'\nreward.function = 'r.py:reward'\nreward.batch = 8\n")
    load_config(own, further=check_surroundings)
    problem = the_problem(own, "reward.in_flight=4", files=True)
    assert problem.message.startswith("found 8, but a worker holds reward.in_flight = 4")


# The machine


def test_a_gpu_that_is_not_here_is_refused():
    import torch

    missing = f"cuda:{torch.cuda.device_count()}"
    message = the_problem("demo", f"learner.device={missing}", files=True).message

    assert message.startswith(
        f'found "{missing}", but torch {torch.__version__} finds {torch.cuda.device_count()} GPUs'
    )


def test_an_engine_whose_package_is_not_here_is_refused_unless_its_environment_has_it(written, tmp_path):
    problem = the_problem("demo", "engine.kind=sglang", files=True)
    (tmp_path / "elsewhere" / "sglang").mkdir(parents=True)
    (tmp_path / "elsewhere" / "sglang" / "__init__.py").touch()
    environment = f"engine.environment={{PYTHONPATH = '{tmp_path}/elsewhere'}}"

    assert problem.message.startswith('engine.kind = "sglang", but there is no package sglang here; install it')
    load_config("demo", overrides=["engine.kind=sglang", environment], further=check_surroundings)


def test_a_router_whose_package_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch):
    load_config("demo", overrides=["engine.router.count=1"], further=check_surroundings)
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    message = the_problem("demo", "engine.router.count=1", files=True).message

    assert message.startswith("found 1, but there is no package sglang-router here; install it: pip install -e")
