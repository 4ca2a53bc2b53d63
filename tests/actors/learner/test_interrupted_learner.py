"""A learner that is killed while it trains again loses no progress, and one that is stopped in a step ends."""

import asyncio
import threading

import msgspec
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.training.torch.trainer import TorchTrainer
from harness.learning import Open, log_of, opened, pack, saved, train
from harness.stage import until
from topics.batches import BATCH_TRAINED, Objective
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED

__all__ = ["opened"]  # a fixture


async def test_a_learner_that_trains_again_saves_on_the_way(opened: Open, bus: Bus, monkeypatch):
    first = await opened(learner={"checkpoint_every": 100})
    await train(bus, 1, 5)
    await first.kill()
    assert not (await log_of(bus))[CHECKPOINT_SAVED]

    monkeypatch.setattr("actors.learner.actor.RESAVE_S", 0.0)
    second = await opened()
    await until(lambda: saved(bus, 4), "a checkpoint of a step that is trained again")
    await second.kill()
    third = await opened()
    await train(bus, 6, 6)

    log = await log_of(bus)
    assert [message.step for message in log[CHECKPOINT_SAVED]] == [1, 2, 3, 4]
    assert third.learner.batch_sequence == log[BATCH_TRAINED][-1].batch_sequence
    assert [message.step for message in log[BATCH_TRAINED]] == [*range(1, 7)]
    assert {message.lineage for message in log[WEIGHTS_PUBLISHED]} == {0}


@pytest.mark.parametrize("is_published", [False, True])
async def test_a_learner_whose_weights_differ_keeps_the_lineage_of_its_last_checkpoint(
    opened: Open, bus: Bus, monkeypatch, is_published: bool
):
    first = await opened(learner={"checkpoint_every": 100})
    await train(bus, 1, 4)
    await first.kill()

    monkeypatch.setattr("actors.learner.actor.RESAVE_S", 0.0)
    step = TorchTrainer.step
    monkeypatch.setattr(
        TorchTrainer, "step", lambda self, rows, objective, *rest: step(self, rows, faster(objective), *rest)
    )
    second = await opened()
    await until(lambda: saved(bus, 3), "a checkpoint of a step that is trained again")
    if is_published:
        await until(lambda: published(bus, 1), "a version of the new lineage")
    await second.kill()
    await opened()
    await train(bus, 5, 5)

    log = await log_of(bus)
    assert {message.lineage for message in log[CHECKPOINT_SAVED]} == {1}
    assert [(message.lineage, message.version) for message in log[WEIGHTS_PUBLISHED]][-2:] == [(1, 4), (1, 5)]


async def test_a_learner_that_shall_stop_during_a_step_ends_after_it(opened: Open, bus: Bus, monkeypatch):
    training, released = threading.Event(), threading.Event()
    step = TorchTrainer.step

    def held_step(trainer, *given):
        training.set()
        assert released.wait(60.0)
        return step(trainer, *given)

    monkeypatch.setattr(TorchTrainer, "step", held_step)
    playing = await opened()
    await pack(bus, 1)
    await asyncio.to_thread(training.wait, 60.0)
    threading.Timer(1.0, released.set).start()  # from a thread: a learner that spins would hold up this task
    playing.context.stop.set()

    await asyncio.wait_for(playing.task, 60.0)
    assert [message.step for message in (await log_of(bus))[BATCH_TRAINED]] == [1]


async def published(bus: Bus, lineage: int) -> bool:
    """Return whether a version of a lineage was published."""
    return any(message.lineage == lineage for message in (await log_of(bus))[WEIGHTS_PUBLISHED])


def faster(objective: Objective) -> Objective:
    """An objective that trains to other bits, as a device without deterministic sums does."""
    return msgspec.structs.replace(objective, learning_rate=2 * objective.learning_rate)
