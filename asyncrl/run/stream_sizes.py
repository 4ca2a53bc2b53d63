"""Giving the streams of a run their sizes when it starts, or goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import ServerFull
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import held_bytes, provision
from asyncrl.bus.publish import read
from asyncrl.config.room import Progress
from asyncrl.config.settings import Config
from asyncrl.config.sizing import Plan, plan
from asyncrl.data.protocol import DataError
from asyncrl.run.make_model import LaunchError
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.topic import TRAINING


async def provision_sized(bus: Bus, config: Config, base: Path, root: Path) -> dict[str, int]:
    """Make or change the streams of a run so that it can reach its end.

    Args:
        base: folder of the config's relative paths.
        root: the run's directory.

    Returns:
        Bytes that each stream may hold, by name.

    Raises:
        LaunchError: the settings, the disk or the server leave it too little room, or its data cannot be read.
        BusError: the streams could not be made.
    """
    progress = await _progress(bus, config)
    try:
        planned = await asyncio.to_thread(plan, config, base, root=root, progress=progress)
    except (DataError, OSError) as error:
        raise LaunchError(f"task.source: {error}") from error
    short = [f"{finding.keys[0]}: {finding.message}" for finding in planned.shortages()]
    if short:
        raise LaunchError("; ".join(short))
    try:
        return await _provisioned(bus, planned)
    except ServerFull as error:
        planned = dataclasses.replace(planned, room=error.room)
    try:
        return await _provisioned(bus, planned)
    except ServerFull as error:
        raise LaunchError(f"{error}; {planned.advice}") from error


async def _provisioned(bus: Bus, planned: Plan) -> dict[str, int]:
    sizes, config = planned.sizes, planned.config
    await provision(bus, sizes, lease_s=config.rollout.lease_s, copies=config.nats.copies)
    return sizes


async def _progress(bus: Bus, config: Config) -> Progress | None:
    """Return the progress of the run; None where it has no streams yet."""
    held = await held_bytes(bus)
    if not held:
        return None
    newest = await read_last(bus, TRAINING, BATCH_TRAINED.pattern(bus.run)) if TRAINING.name in held else None
    step = (await read(bus, BatchTrained, newest)).step if newest is not None else config.origin
    return Progress(
        {name: stream.stored for name, stream in held.items()},
        {name: stream.most for name, stream in held.items()},
        step - config.origin,
        config.learner.steps - step,
        step < config.start.step,
    )
