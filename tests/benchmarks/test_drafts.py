"""`asyncrl bench drafts`: what it does without a server, which needs a GPU."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks import drafts
from benchmarks.drafts import Sample, accept_length, trained, write_model

SMALL = {"intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8}
AHEAD = "model.layers.4.eh_proj.weight"  # of the layer that predicts ahead


@pytest.mark.slow
@pytest.mark.nightly
def test_the_layer_ahead_is_trained_with_a_weight_and_stays_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, size in SMALL.items():
        monkeypatch.setitem(drafts._SHAPE, name, size)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # which megatron would spend most of the time on
    write_model(tmp_path / "model")
    samples = [Sample([3, 4], [(first + 7 * i) % 70 + 3 for i in range(16)], [-1.0] * 16, 8) for first in range(4)]
    before = load_file(tmp_path / "model" / "model.safetensors")[AHEAD]

    # Not in the process of the tests: megatron keeps its groups for as long as a process lives.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        given = (tmp_path / "model", samples)
        versions = {
            weight: process.submit(trained, tmp_path / f"{weight}", *given, weight, 1, 1e-3).result(timeout=600)
            for weight in (0, 1)
        }

    after = {
        weight: load_file(next(Path(one.location).glob("*.safetensors")))[AHEAD] for weight, one in versions.items()
    }
    assert accept_length(samples) == 2.0
    assert (after[0].to(before.dtype) == before).all()
    assert (after[1] != after[0]).any()
