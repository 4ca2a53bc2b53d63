"""Models that tests of trainers share."""

import dataclasses

import pytest

from asyncrl.training.init_model import create_model
from asyncrl.training.torch.trainer import TorchTrainer
from harness.roles import ALPHABET, SHAPE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, and a wider teacher."""
    root = tmp_path_factory.mktemp("models")
    create_model(root / "policy", alphabet=ALPHABET, seed=0, shape=SHAPE)
    create_model(root / "teacher", alphabet=ALPHABET, seed=1, shape=dataclasses.replace(SHAPE, hidden=48))
    return root


@pytest.fixture(scope="module")
def model(models):
    return models / "policy"


@pytest.fixture
def trainer(model):
    return TorchTrainer(model)
