"""Ranks of the torch trainer that share the tokens of each row: their step is that of one rank."""

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchTrainer
from harness.divided_rows import REFUSED, SETTINGS
from harness.families import FAMILIES, write_family
from harness.rank_cases import gradient, rows_of
from harness.ranks import run_group
from harness.training import copies, of_all_ranks, policy

pytestmark = pytest.mark.slow  # four processes with torch
SHAPE = ModelShape(hidden=32, head_dim=16, ffn=64, context=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("divided")
    for name in (*SETTINGS, *REFUSED):
        if name in FAMILIES:
            write_family(root / name, name)
        else:
            create_model(root / name, alphabet="abcdefghijklmnopqrstuvwxyz=", seed=0, shape=SHAPE)
    return root


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_tokens_of_rows_come_to_the_gradient_and_the_step_of_one(folder, ranks):
    said = run_group(["-m", "tests.harness.divided_rows"], ranks, ranks, folder).splitlines()

    for name in SETTINGS:
        trainer = TorchTrainer(folder / name)
        expected, found = gradient(trainer, rows_of(False), 1), load_file(folder / f"{name}-{ranks}.safetensors")
        assert found.keys() == expected.keys()
        norm = torch.nn.utils.get_total_norm(expected.values())
        apart = torch.nn.utils.get_total_norm([found[key] - one for key, one in expected.items()])
        assert apart / norm < 1e-5, name
    for name, line in zip(SETTINGS, said, strict=False):
        own, length = map(int, line.removeprefix(name).split())
        assert own <= (length + 3) / 2  # filled up to four chunks, of which a rank has two
    trainer.step(rows_of(False), policy())
    stepped = of_all_ranks(folder, f"stepped{ranks}")
    for name, tensor in copies(trainer).items():
        assert torch.allclose(stepped[name], tensor, atol=2e-4), name
    layers = [line.partition(" has ")[2].partition(";")[0] for line in said[len(SETTINGS) :]]
    assert layers == list(REFUSED.values())
    assert all("set learner.layout.context = 1" in line for line in said[len(SETTINGS) :])
