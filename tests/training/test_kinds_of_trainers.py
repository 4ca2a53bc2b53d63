"""Each kind of trainers is described by its folder, and what it claims holds."""

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from asyncrl.config.check_learner import trainer_contradictions
from asyncrl.config.learner_settings import TRAINERS, LayoutSettings, LoraSettings
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.trainers import trainer_kind, trainers_with

FOLDER = Path(__file__).parents[2] / "asyncrl" / "training"
CHANGED = {
    "share_prefixes": True,
    "layout": LayoutSettings(context=2),
    "mtp_weight": 0.1,
    "router_bias_rate": 0.001,
    "exchange": "step",
    "activations": 0.9,
    "offload_activations": True,
    "moments": "bfloat16",
    "lora": LoraSettings(rank=4),
    "head": "float32",
}


def test_the_trainers_that_settings_take_are_the_folders_with_a_description():
    assert get_args(get_type_hints(LearnerSettings)["trainer"]) == TRAINERS
    assert {path.parent.name for path in FOLDER.glob("*/kind.py")} == set(TRAINERS)


def test_only_settings_of_the_learner_are_of_some_trainers():
    assert {key for name in TRAINERS for key in trainer_kind(name).settings} == CHANGED.keys()


@pytest.mark.parametrize("name", TRAINERS)
def test_a_plain_config_passes_the_hooks_of_a_trainer(name: str, tmp_path: Path):
    kind, config = trainer_kind(name), Config(learner=LearnerSettings(trainer=name))

    assert not list(trainer_contradictions(config))
    assert not [one for one in kind.preflight(config, tmp_path) if "package" not in one.message]
    assert all("estimated" in line for line in kind.memory_lines(config, tmp_path))


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("key", CHANGED)
def test_a_setting_is_refused_with_a_trainer_that_lacks_it_and_taken_with_others(name: str, key: str):
    config = Config(learner=msgspec.structs.replace(LearnerSettings(trainer=name, ranks=2), **{key: CHANGED[key]}))

    found = list(trainer_contradictions(config))

    assert (found == []) == (key in trainer_kind(name).settings)
    for finding in found:
        assert finding.keys[0].startswith(f"learner.{key}")
        assert f'the trainer "{name}" has no {key}' in finding.message
        assert trainers_with(key) in finding.message


def test_no_description_of_a_kind_loads_what_computes():
    code = f"""
import sys
from asyncrl.config.trainers import trainer_kind
for name in {TRAINERS}:
    trainer_kind(name)
print(*{{"torch", "transformers", "megatron.core"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("settings", "keys", "words"),
    [
        ({"layout": LayoutSettings(tensor=2)}, ["learner.layout.tensor", "learner.trainer"], "leave out tensor"),
        (
            {"ranks": 3},
            ["learner.layout.context", "learner.ranks"],
            "expected a multiple of context = 2",
        ),
        ({"share_prefixes": True}, ["learner.share_prefixes", "learner.layout.context"], "set false"),
        ({"routing": "trainer"}, ["learner.routing", "learner.layout.context"], 'set "own"'),
    ],
)
def test_the_torch_trainer_divides_tokens_alone_and_each_token_once(settings, keys, words):
    learner = {"trainer": "torch", "ranks": 2, "layout": LayoutSettings(context=2), **settings}

    [found] = trainer_contradictions(Config(learner=LearnerSettings(**learner)))

    assert list(found.keys) == keys
    assert words in found.message
