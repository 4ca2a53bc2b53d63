"""Overrides allowed when a run is resumed: its length, its room, where its server listens, and its objective, which
counts from the next batch that is packed."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.load import with_overrides
from asyncrl.config.settings import Config
from asyncrl.run.make_model import LaunchError

_LENGTHS = ("learner.steps", "task.epochs")
_ROOM = ("nats.stream_max_mb", "nats.ledger_max_mb", "nats.disk_max_mb", "nats.host", "nats.port")
_OBJECTIVE = tuple(
    f"learner.{name}"
    for name in (
        *("lr", "lr_warmup_steps", "schedule", "betas", "weight_decay", "max_grad_norm"),
        *("loss", "loss_options", "advantage", "aggregation", "filters"),
    )
)


def longer(config: Config, overrides: Sequence[str]) -> Config:
    """The settings of a run that goes on: those it began with, but for those that may change.

    Args:
        overrides: `learner.steps=N`, `task.epochs=N` (0 is without end), `learner.lr=1e-5`, or nothing.

    Raises:
        ConfigError: settings that cannot be.
        LaunchError: another setting, or fewer steps or epochs.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in (*_LENGTHS, *_ROOM, *_OBJECTIVE) and not key.startswith("learner.loss_options."):
            raise LaunchError(
                f"--set {override}: a run goes on with the settings it began with; only {' and '.join(_LENGTHS)} "
                f"may be raised, and {', '.join((*_OBJECTIVE, *_ROOM))} may change"
            )
    wanted = with_overrides(config, overrides) if overrides else config
    steps, epochs = config.learner.steps, config.task.epochs
    if wanted.learner.steps < steps:
        given = f"--set learner.steps={wanted.learner.steps}"
        raise LaunchError(f"{given}: the run began with {steps} steps; they may only be raised")
    if wanted.task.epochs != epochs and not 0 < epochs <= (wanted.task.epochs or epochs):
        given = f"--set task.epochs={wanted.task.epochs}"
        raise LaunchError(f"{given}: the run began with {epochs}; it may be raised, 0 is no end")
    return wanted
