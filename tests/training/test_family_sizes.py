"""Published sizes of each family, by name and shape, without a weight of them."""

import json
import math
import subprocess
import sys

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.training.disk_names import DiskNames, stored
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.memory import parameters_of
from asyncrl.training.megatron.parallel_config import Layout
from harness.published import PUBLISHED

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # models of a trillion parameters have many names


def written(folder, name):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_that_transformers_writes(tmp_path, name):
    family, shape = read_family(written(tmp_path / "model", name))
    options, billions = PUBLISHED[name]
    kind = "deepseek_v3" if options["model_type"] == "kimi_k2" else options["model_type"]  # it has its code elsewhere
    config = AutoConfig.for_model(kind, **{key: value for key, value in options.items() if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    theirs, names = {}, DiskNames.of(model)
    for key, tensor in stored(model).items():
        theirs |= names.shapes(key, tuple(tensor.shape))
    ours = family.tensors(shape)
    assert ours == theirs
    assert sum(map(math.prod, ours.values())) / 1e9 == pytest.approx(billions, rel=0.01)
    [found] = parameters_of(family, shape, Layout())
    assert sum(found) == sum(parameter.numel() for parameter in model.parameters())


def test_the_layer_that_predicts_ahead_has_the_parameters_of_its_report(tmp_path):
    """DeepSeek-V3's README_WEIGHTS.md: 11.5 billion, without embedding and head, which are the trunk's."""
    family, shape = read_family(written(tmp_path / "model", "DeepSeek-V3"))
    trunk, whole = (family.tensors(msgspec.structs.replace(shape, ahead=ahead)) for ahead in (False, True))
    further = {name: whole[name] for name in whole.keys() - trunk.keys()}
    assert all(name.startswith("model.layers.61.") for name in further)
    assert sum(map(math.prod, further.values())) / 1e9 == pytest.approx(11.5, rel=0.01)


def test_each_tensor_has_its_place_in_a_model_of_the_library(tmp_path):
    same = ("GLM-4.5", "Kimi-K2")  # their modules are those of GLM-4.5-Air and DeepSeek-V3
    folders = [written(tmp_path / name, name) for name in PUBLISHED if name not in same]
    command = [sys.executable, "-m", "tests.harness.megatron_sizes", *map(str, folders)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
