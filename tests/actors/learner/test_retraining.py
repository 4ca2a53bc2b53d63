"""Beginnings of replays."""

from collections.abc import Callable

import numpy as np
import pytest

from actors.learner.retraining import ReplayError, Retraining, TrainingLog
from asyncrl.bus.connection import Bus
from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files.store import FileStore
from harness.stage import Stage
from harness.training import policy, policy_rows
from topics.batches import BatchPacked
from topics.weights import CheckpointSaved


async def test_no_replay_begins_with_a_part_of_a_checkpoint(bus: Bus, stage: Callable[..., Stage], tmp_path):
    """The critic does not fit, which is found when the policy is loaded; the untrained model is not there any more."""
    stand = stage()
    stand.make_model()
    await stand.open()
    context = stand.context("learner", bus)
    model = context.files.model_path(context.config.model)
    critic = tmp_path / "critic"
    create_model(critic, alphabet=context.config.model.create.alphabet, seed=0, shape=ModelShape(hidden=32, context=64))
    trained, trainer = (TorchTrainer(model, TorchSettings(critic=directory)) for directory in (critic, model))
    trained.step(policy_rows(np.random.default_rng(0), 6), policy())
    publisher = Publisher(trained, store=FileStore(tmp_path / "weights"), checkpoints=tmp_path / "checkpoints")
    publisher.copy_weights()
    publisher.copy_state()
    path = publisher.save(Checkpoint(0, 1, publisher.digest(), 1))
    log = TrainingLog()
    log.checkpoints.append(CheckpointSaved(0, 1, "", str(path), 1))
    log.batches.update({step: (BatchPacked(step, "rl", [], 0), step) for step in range(-200, 3)})
    retraining = Retraining(bus, log, trainer, context.config, context.files)

    with pytest.raises(ReplayError, match=r"cannot be loaded with these settings: .*: \S+ has shape"):
        await retraining.begin(at=1, until=2)
