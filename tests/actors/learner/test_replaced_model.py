"""A learner that goes on where the model of its run was replaced: its checkpoints are of the one before."""

import asyncio
import shutil
from collections.abc import Callable

import pytest

from actors.learner.group import in_process
from actors.runtime.actor import ActorFault
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.training.init_model import ModelShape, create_model
from harness.learning import Playing, log_of, pack
from harness.stage import Connect, Stage, until
from topics.weights import CHECKPOINT_LOST, CHECKPOINT_SAVED

SMALL = {"rollout": {"max_new_tokens": 8, "group_size": 2}, "buffer": {"batch_groups": 1, "max_lag": 1}}


async def test_a_model_of_another_shape_ends_the_learner_and_no_checkpoint_is_lost(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.learner.actor.new_group", in_process)
    stand = stage(**SMALL, supervision={"silence_s": 1.0}, learner={"checkpoint_every": 1})
    stand.make_model()
    first = Playing(stand.context("learner", await connect(bus.run, name="learner-1")))
    await pack(bus, 1)
    await until(lambda: read_last(bus, CHECKPOINT_SAVED), "checkpoint 1")
    await first.kill()
    model, create = stand.files.model, stand.config.model.create
    shutil.rmtree(model)
    create_model(model, alphabet=create.alphabet, seed=1, shape=ModelShape(hidden=32))

    again = Playing(stand.context("learner", await connect(bus.run, name="learner-2")))
    words = r"has shape .*; a checkpoint continues only the model it was made from; the last checkpoint is intact"
    async with asyncio.timeout(300):
        with pytest.raises(ActorFault, match=words):
            await again.task
    await again.kill()

    assert (await log_of(bus))[CHECKPOINT_LOST] == []
