"""`asyncrl check` of models that no list of asyncrl names, and of models that cannot be trained."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.api.check import check
from asyncrl.data.model_dir import ModelError
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.megatron.families import FAMILIES as LISTED
from asyncrl.training.transformers_config import read_transformers_config
from harness.families import FAMILIES, SHAPE, change_config, write_family

CONFIG = """
model.path = "model"
engine.kind = "external"
engine.addresses = ["http://127.0.0.1:9"]
rollout.max_new_tokens = 9
task.source = "rows.jsonl"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a family that no list names."""
    directory = tmp_path_factory.mktemp("model") / "olmo-3"
    write_family(directory, "olmo-3")
    return directory


def checked(folder: Path, further: str = ""):
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "ab", "label": "a"}) + "\n")
    (folder / "config.toml").write_text(CONFIG + further)
    return check(folder / "config.toml")


@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss", "gemma-3", "minimax-m2", "nemotron-3", "olmo-3"])
def test_a_family_that_no_list_names_passes_check_with_a_line_of_its_capabilities(tmp_path, name):
    write_family(tmp_path / "model", name)
    [architecture] = json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    assert architecture not in LISTED

    found = checked(tmp_path)

    assert not found.problems
    [line] = [fact for fact in found.facts if fact.startswith(architecture)]
    assert line.startswith(f"{architecture} works with torch, packed")
    assert "megatron (no such family), embedded (not served)" in line
    apart = FAMILIES[name][0] in ("qwen3_next", "nemotron_h")
    assert ("context parallel (" in line) == (name != "minimax-m2")
    assert ("once per document" in line) == apart
    assert ("prefix sharing (layers carry a state" in line) == apart


def test_delta_nets_of_a_listed_family_pass_check_for_both_trainers(tmp_path):
    write_family(tmp_path / "model", "qwen3.5")

    found = checked(tmp_path)

    assert not found.problems
    words = "works with torch, packed with Qwen3_5GatedDeltaNet once per document, megatron, LoRA"
    [line] = [fact for fact in found.facts if words in fact]
    assert "prefix sharing (layers carry a state" in line


def test_a_model_that_cannot_pack_passes_check_with_a_hint_that_names_the_layer_kind(tmp_path):
    write_family(tmp_path / "model", "deepseek-v3.2")

    found = checked(tmp_path)

    assert not found.problems
    assert any("would leak in DeepseekV32Attention, so each is a padded row" in hint for hint in found.hints)
    assert any("works with torch, padded" in fact for fact in found.facts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
            r"model type 'mine' has its code among its files \(auto_map in config.json\), which asyncrl never runs",
        ),
        ({"model_type": "olmo9"}, r"transformers [\d.]+ has no model type 'olmo9'; install a version that has it"),
        (
            {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]},
            "Qwen3VLForConditionalGeneration is no language model alone, but one with images",
        ),
    ],
    ids=["remote code", "a family that transformers lacks", "a vision model"],
)
def test_a_model_that_cannot_be_trained_is_one_clear_error(model, tmp_path, changes, words):
    shutil.copytree(model, tmp_path / "model")
    change_config(tmp_path / "model", **changes)

    with pytest.raises(ModelError, match=words):
        read_transformers_config(tmp_path / "model")
    [problem] = checked(tmp_path).problems
    assert "model.path" in problem.key


def test_ranks_that_share_tokens_need_full_attention_and_the_layer_that_lacks_it_is_named(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")

    [problem] = checked(tmp_path, "learner.ranks = 2\nlearner.layout.context = 2\n").problems

    assert "learner.layout.context" in problem.key
    assert "ranks share the tokens of full attention alone" in problem.message
    assert problem.message.endswith("has Olmo3Attention with a sliding window; set learner.layout.context = 1")


class Counting(torch.nn.Module):
    """A layer that has another output at each call."""

    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return hidden / self.calls


class LeakingConfig(LlamaConfig):
    model_type = "leaking"


class LeakingModel(LlamaForCausalLM):
    config_class = LeakingConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp = Counting()


def test_a_model_whose_documents_leak_in_every_arrangement_is_refused_with_the_layer_kind():
    AutoConfig.register("leaking", LeakingConfig, exist_ok=True)
    AutoModelForCausalLM.register(LeakingConfig, LeakingModel, exist_ok=True)

    with pytest.raises(ModelError, match="several documents leaks in Counting, and padded rows differ from separate"):
        arrangement_of(LeakingConfig(**SHAPE))


def test_weights_of_another_model_are_refused_by_the_name_of_a_tensor(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    change_config(tmp_path / "model", intermediate_size=40)

    [problem] = checked(tmp_path).problems

    assert "mlp.gate_proj.weight is [40, 32], in the weights it is [48, 32]" in problem.message


_FLA = """
def chunk_gated_delta_rule(query, key, value, g=None, beta=None, **options):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
"""


def test_a_flash_linear_attention_that_no_cpu_can_run_is_not_used_on_a_cpu(tmp_path):
    rule = tmp_path / "site" / "fla" / "ops" / "gated_delta_rule"
    rule.mkdir(parents=True)
    (rule / "__init__.py").write_text(_FLA)
    for folder in (rule.parent, rule.parent.parent):
        (folder / "__init__.py").touch()
    facts = tmp_path / "site" / "flash_linear_attention-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-linear-attention\nVersion: 0.1.0\n")
    write_family(tmp_path / "model", "qwen3-next")
    # transformers takes the kernels of the package as its module is imported, so another process has to.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from asyncrl.training.transformers_model import check_transformers_model as check; check(Path(sys.argv[2]))"
    )

    command = [sys.executable, "-c", code, str(tmp_path / "site"), str(tmp_path / "model")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert not found.returncode, found.stderr
