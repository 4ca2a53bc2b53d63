"""The same batch over 1, 2 and 4 ranks, in 1, 3 and 7 micro-batches, packed and padded, merged and fanned out."""

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.training.init_model import ModelShape, create_model
from harness.ranks import run_group
from harness.training import of_all_ranks

pytestmark = pytest.mark.slow  # four processes with torch
SHAPE = ModelShape(hidden=32, head_dim=16, ffn=64, context=32)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    create_model(folder / "model", alphabet="abcdefghijklmnopqrstuvwxyz=", seed=0, shape=SHAPE)
    run_group(["-m", "tests.harness.rank_cases"], 4, folder / "model", folder)
    return folder


def test_the_gradient_is_the_same_at_any_ranks_micro_batches_padding_and_fan_out(results):
    cases = {}
    for ranks in (1, 2, 4):
        for name, tensor in load_file(results / f"gradients{ranks}.safetensors").items():
            case, parameter = name.split("/")
            cases.setdefault(case, {})[parameter] = tensor
    assert len(cases) == 3 * 3 * 2 * 2
    expected = cases["1-1-merged-packed"]
    norm = torch.nn.utils.get_total_norm(expected.values())
    assert norm > 1e-2
    for case, found in cases.items():
        assert found.keys() == expected.keys()
        apart = torch.nn.utils.get_total_norm([found[name] - expected[name] for name in expected])
        assert apart / norm < 1e-6, case


def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_four(results):
    states = {ranks: of_all_ranks(results, f"states{ranks}") for ranks in (1, 2, 4)}
    before = [name for name in states[2] if name.startswith("before/")]
    assert any("exp_avg_sq." in name for name in before)
    for ranks in (1, 4):
        assert states[ranks].keys() == states[2].keys()
        for name in states[2]:
            if name in before:
                assert torch.equal(states[ranks][name], states[2][name]), (ranks, name)
            else:
                assert torch.allclose(states[ranks][name], states[2][name], atol=2e-4), (ranks, name)
