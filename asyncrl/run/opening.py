"""The opening of a run: what its actors learn from its topics."""

from __future__ import annotations

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.publish import publish
from asyncrl.config.settings import Config
from asyncrl.own_code import read_inputs
from asyncrl.run.directory import RunFiles
from topics.actors import RunOpened
from topics.batches import BATCH_TRAINED


async def open_run(bus: Bus, config: Config, files: RunFiles) -> int:
    """Publish that a run begins or continues; returns the newest step that was trained before."""
    newest = await newest_message(bus, BATCH_TRAINED)
    trained = newest[0].step if newest is not None else config.origin
    await publish(bus, run_opened(config, files, trained))
    return trained


def run_opened(config: Config, files: RunFiles, trained: int | None = None) -> RunOpened:
    """Return the settings of a run, the folders of actors that share its files, and the digests of its inputs.

    Args:
        trained: newest trained step; None if no step is trained.
    """
    inputs = read_inputs(files.root)
    return RunOpened(
        config.learner.steps,
        config.warmup.steps,
        msgspec.to_builtins(config),
        str(files.root.absolute()),
        str(files.base),
        inputs.digests if inputs is not None else {},
        config.origin if trained is None else trained,
    )
