"""Steps on several GPUs, and by models that leave their GPU, against one process on the CPU in float32."""

import pytest
import torch
from safetensors.torch import load_file

from harness.gpu_cases import CASES, by_one_process, by_ranks, write_models

COMPARED = {"loss": 0.03, "grad_norm": 0.07, "value_loss": 0.03, "value_grad_norm": 0.07}
"""Figures of a step, and by what share of the CPU's, or of 1 where that is smaller, they may differ."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    write_models(made)
    return made


def apart(near, exact):
    """Norm of the differences of tensors to others, over the norm of those."""
    both = [(near[key].double(), one.double()) for key, one in exact.items()]
    far, size = (
        sum(float(one.square().sum()) for one in each) for each in ([a - b for a, b in both], [b for _, b in both])
    )
    return (far / size) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_steps_on_cards_in_bfloat16_are_those_of_the_cpu_in_float32(name, folder):
    if (found := torch.cuda.device_count()) < CASES[name].ranks:
        pytest.skip(f"takes {CASES[name].ranks} GPUs, found {found}")
    figures, state = by_ranks(name, "cuda", folder)
    expected, exact = by_one_process(name, folder)

    for step, (own, right) in enumerate(zip(figures, expected, strict=True)):
        for key, share in COMPARED.items():
            if key in right:
                assert own[key] == pytest.approx(right[key], abs=share * max(abs(right[key]), 1.0)), (step, key)
    assert state.keys() == exact.keys()
    moments = {key: one for key, one in exact.items() if ":exp_avg." in key}
    assert moments and apart(state, moments) < 0.1
    begun = load_file(folder / ("qwen3-moe" if CASES[name].mixture else "qwen3") / "model.safetensors")
    moved = [{key: held[f"model:{key}"] - one for key, one in begun.items()} for held in (state, exact)]
    assert apart(*moved) < 0.1
