"""Errors of layouts that nothing reports (wrong gradients, right log-probs): each one shows in the norm of a step."""

import json

import pytest

from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from harness.mixtures import SMALL, write_transformers_model
from harness.planted_errors import ERRORS, OBJECTIVE, RECORDED, rows_of
from harness.ranks import run_group

pytestmark = pytest.mark.slow  # two processes with torch


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """By error: norms of megatron's first step as it is and with the error, and that of the torch trainer.

    And by layout what is between two passes, of which the second goes by the experts of the first.
    """
    folder, expected = tmp_path_factory.mktemp("planted"), {}
    for name in {name for name, _, _ in ERRORS.values()}:
        write_transformers_model(folder / name, *SMALL[name])
        trainer = TorchTrainer(folder / name, TorchSettings(micro_batch_tokens=64, replays=name == "qwen3-moe"))
        expected[name] = trainer.step(rows_of(name), OBJECTIVE)["grad_norm"]
    said = run_group(["-m", "tests.harness.planted_errors"], 2, folder, deadline_s=120)
    found = json.loads(said.splitlines()[-1])
    return {error: (*found.pop(error), expected[name]) for error, (name, _, _) in ERRORS.items()} | found


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_shows_in_the_norm_of_the_gradient(norms, error):
    right, planted, expected = norms[error]

    assert right == pytest.approx(expected, rel=1e-5)
    assert planted != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("layout", RECORDED)
def test_tokens_go_where_they_went_in_the_pass_before_the_update(norms, layout):
    assert norms[layout] < 1e-5
