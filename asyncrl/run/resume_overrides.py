"""Overrides allowed when a run is resumed: its length, its room and where its server listens, and nothing of what it
did."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.config.load import with_overrides
from asyncrl.config.settings import Config
from asyncrl.run.make_model import LaunchError

_SIZES = ("nats.stream_max_mb", "nats.ledger_max_mb", "nats.disk_max_mb")
_PLACE = ("nats.host", "nats.port")
_CHANGEABLE = ("learner.steps", "task.epochs", *_SIZES)


def longer(config: Config, overrides: Sequence[str]) -> Config:
    """The settings of a run that goes on: those it began with, but for more steps or epochs, other sizes and ports.

    Args:
        overrides: `learner.steps=N`, `task.epochs=N` (0 is without end), `nats.ledger_max_mb=N`, or nothing.

    Raises:
        ConfigError: `nats.host` or `nats.port` that cannot be.
        LaunchError: another setting, fewer of these, or steps that would change the learning rates of those taken.
    """
    learner, task = config.learner, config.task
    elsewhere = [override for override in overrides if override.partition("=")[0].strip() in _PLACE]
    nats = with_overrides(config, elsewhere).nats
    for override in overrides:
        if override in elsewhere:
            continue
        key, _, value = (word.strip() for word in override.partition("="))
        if key not in _CHANGEABLE or not value.isdecimal():
            raise LaunchError(
                f"--set {override}: a run goes on with the settings it began with; only learner.steps and task.epochs "
                f"may be raised, and {', '.join((*_SIZES, *_PLACE))} may change"
            )
        number = int(value)
        if key in _SIZES:
            nats = msgspec.structs.replace(nats, **{key.removeprefix("nats."): number})
            continue
        if key == "task.epochs":
            if number and not 0 < task.epochs <= number:
                raise LaunchError(f"--set {override}: the run began with {task.epochs}; it may be raised, 0 is no end")
            task = msgspec.structs.replace(task, epochs=number)
            continue
        if number < learner.steps:
            raise LaunchError(f"--set {override}: the run began with {learner.steps} steps; they may only be raised")
        if number > learner.steps and learner.schedule != "constant":
            raise LaunchError(
                f"--set {override}: with learner.schedule = {learner.schedule} another number of steps would change "
                "the learning rates of the steps already taken; a new run takes them from a step on: "
                f"asyncrl fork {config.run} NEW --at STEP --set {override}"
            )
        learner = msgspec.structs.replace(learner, steps=number)
    return msgspec.structs.replace(config, learner=learner, task=task, nats=nats)
