"""Passing over a batch that cannot be trained, so that its run can go on."""

from __future__ import annotations

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.run.make_model import LaunchError
from topics.actors import SkipRequested
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked, BatchTrained
from topics.topic import BATCHES, TRAINING


async def request_skip(bus: Bus, origin: int, step: int) -> None:
    """Ask the learner of a run to end a batch without training on it.

    Args:
        origin: step of the weights before the first batch.

    Raises:
        LaunchError: it is trained already, or not packed yet.
    """
    newest = await read_last(bus, TRAINING, BATCH_TRAINED.subject(bus.run))
    trained = origin if newest is None else (await read(bus, BatchTrained, newest)).step
    newest = await read_last(bus, BATCHES, BATCH_PACKED.subject(bus.run))
    packed = origin if newest is None else (await read(bus, BatchPacked, newest)).step
    if not trained < step <= packed:
        waiting = f"batches {trained + 1} to {packed} wait to be trained" if trained < packed else "no batch waits"
        raise LaunchError(f"--skip-batch {step}: batches up to {trained} are trained, and {waiting}")
    await publish(bus, SkipRequested(step))
