"""Adapters (LoRA) of the megatron trainer against those of the torch trainer, on two ranks."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.adapters import PEFT_PREFIX
from harness.megatron_adapters import CASES, EXPERTS, TARGETS, lora_of, rows_at
from harness.megatron_cases import EPS, FIGURES, objective
from harness.mixtures import SMALL, write_transformers_model
from harness.ranks import run_group
from harness.training import copies, save

pytestmark = pytest.mark.slow  # two processes with torch

DAILY = ("tensor", "experts")
COUNTED = torch.tensor([name not in ("rows", "rows_skipped") for name in FIGURES])


def with_marks(names):
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name not in DAILY)) for name in names]


def opened(folder, case, **further):
    lora = dataclasses.replace(lora_of(case), published=False)
    settings = TorchSettings(
        micro_batch_tokens=64, eps=EPS, dtype=case.dtype, replays=case.model == EXPERTS, lora=lora, **further
    )
    return TorchTrainer(folder / case.model, settings)


def step(trainer, case, number):
    metrics = trainer.step(rows_at(case, number), objective(number))
    return torch.tensor([metrics[name] for name in FIGURES], dtype=torch.float64)


def first_of(model):
    return next(case for case in CASES.values() if case.model == model)


@pytest.fixture(scope="module")
def expected(request, tmp_path_factory):
    """A folder with what two processes found; and figures, weights before and after of the torch trainer, by model."""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for model in TARGETS:
        write_transformers_model(folder / model, *SMALL[model])
        case = first_of(model)
        trainer, state = opened(folder, case), folder / f"torch-{model}"
        begun, first = copies(trainer), step(trainer, case, 0)
        state.mkdir()
        save(trainer, state)
        found[model] = begun, first, step(trainer, case, 1), copies(trainer), adapters(trainer)
    selected = [item for item in request.session.items if item.path == request.path]
    nightly = any(item.get_closest_marker("nightly") for item in selected)
    run_group(["-m", "tests.harness.megatron_adapters"], 2, folder, *(CASES if nightly else DAILY))
    return folder, found


def adapters(trainer):
    held = trainer._policy.model.named_parameters()
    return {f"{PEFT_PREFIX}{name}.weight": one.detach().clone() for name, one in held if one.requires_grad}


def assert_moved_alike(found, after, begun, tolerance):
    assert found.keys() == after.keys()
    apart = torch.nn.utils.get_total_norm([found[name].float() - one for name, one in after.items()])
    moved = torch.nn.utils.get_total_norm([one - begun[name] for name, one in after.items()])
    assert apart / moved < tolerance


def beginning(tensors, prefix):
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", with_marks(CASES))
def test_steps_of_adapters_and_checkpoints_of_both_trainers_are_those_of_the_torch_trainer(expected, name):
    folder, of_torch = expected
    case, found = CASES[name], load_file(folder / f"{name}.safetensors")
    begun, first, second, after, _ = of_torch[case.model]
    rounded = case.dtype == "bfloat16"
    close = {"rtol": 2e-2, "atol": 4e-3} if rounded else {"rtol": 1e-5, "atol": 1e-7}

    assert torch.allclose(found["first"][COUNTED], first[COUNTED], **close)
    for key in ("second", f"second.{name}", f"second.torch-{case.model}"):
        assert torch.allclose(found[key][COUNTED], second[COUNTED], **close), key
    for prefix in ("after.", f"{name}.", f"torch-{case.model}."):
        assert_moved_alike(beginning(found, prefix), after, begun, 0.2 if rounded else 1e-5)
    if not rounded:
        trainer = opened(folder, case)
        trainer.load(folder / name)
        assert torch.allclose(step(trainer, case, 1)[COUNTED], second[COUNTED], **close)
        assert_moved_alike(copies(trainer), after, begun, 1e-5)


@pytest.mark.parametrize("name", with_marks(name for name, case in CASES.items() if case.published))
def test_published_adapters_have_the_names_and_numbers_of_the_torch_trainer(expected, name):
    folder, of_torch = expected
    case = CASES[name]
    found, wanted = beginning(load_file(folder / f"{name}.safetensors"), "adapter."), of_torch[case.model][-1]

    assert found.keys() == wanted.keys()
    apart = max(float((found[key] - one).abs().max() / one.abs().max()) for key, one in wanted.items())
    assert apart < (0.3 if case.dtype == "bfloat16" else 1e-5)
