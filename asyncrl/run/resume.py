"""Allowed changes to a resumed run: some settings, and a skipped batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.publish import publish
from asyncrl.config.check_learner import has_critic
from asyncrl.config.finding import Finding
from asyncrl.config.load import with_overrides
from asyncrl.config.reference import known_settings
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters
from asyncrl.config.tasks import tasks_of
from asyncrl.config.trainers import trainer_kind
from asyncrl.errors import LaunchError
from asyncrl.run.preflight_model import check_machine
from topics.actors import SkipRequested
from topics.batches import BATCH_PACKED, BATCH_TRAINED

# docs/guides/operate.md lists all of these.
_LENGTHS = ("learner.steps", "task.epochs", "buffer.batch_groups")
_ROOM = (
    *("buffer.max_dropped_groups", "task.row_limit_s", "task.open_limit_s"),
    *("nats.stream_max_mb", "nats.ledger_max_mb", "nats.disk_max_mb", "supervision.log_mb"),
    *("nats.host", "nats.port", "gateway.host", "gateway.port", "gateway.count", "placement.address"),
)
_OBJECTIVE = tuple(
    f"learner.{name}"
    for name in (
        *("lr", "lr_warmup_steps", "schedule", "betas", "weight_decay", "max_grad_norm"),
        *("loss", "loss_options", "columns", "advantage", "turn_discount", "reward_weights", "whiten"),
        *("aggregation", "filters"),
        *("reference.refresh_every", "reference.kl_coef", "reference.kl_estimator", "reference.kl_of"),
        *(f"critic.{name}" for name in ("lr", "betas", "weight_decay", "max_grad_norm", "value_clip")),
        *("critic.discount", "critic.gae_lambda"),
        *("teacher.coef", "teacher.kl_estimator", "teacher.kl_of", "teacher.top_k", "teacher.direction"),
    )
)
_COMPUTED = tuple(
    f"learner.{name}"
    for name in (
        *("trainer", "ranks", "device", "compile", "recompute", "activations", "micro_batch_tokens"),
        *("offload_activations", "offload_idle", "exchange", "elastic_s", "start_s", "share_prefixes"),
    )
)
"""How steps are computed: any trainer, number of ranks and layout continue from a checkpoint of another."""
MAY_CHANGE = (*_LENGTHS, *_ROOM, *_OBJECTIVE, *_COMPUTED)
_OPTIONS = ("learner.loss_options.", "learner.columns.", "learner.filter_options.", "learner.layout.")


def longer(config: Config, overrides: Sequence[str], *, base: Path = Path()) -> Config:
    """The settings of a resumed run: the original ones, except those that may change.

    Args:
        overrides: `learner.steps=N`, `task.epochs=N` (0 is without end), `buffer.batch_groups=N`, `learner.lr=1e-5`,
            `learner.ranks=2`, or nothing.

    Raises:
        ConfigError: settings that cannot be.
        LaunchError: another setting, or fewer steps or epochs.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in MAY_CHANGE and not key.startswith(_OPTIONS):
            if key not in known_settings():
                with_overrides(config, [override], base=base)  # says which setting a mistyped one is near to
            raise LaunchError(
                f"--set {override}: a resumed run keeps its settings, except its lengths ({', '.join(_LENGTHS)}), its "
                "objective, how a step is computed, and limits (listed in docs/guides/operate.md); "
                "`asyncrl fork` starts a run with other settings from a checkpoint"
            )
    wanted = with_overrides(config, overrides, base=base, further=_check_computed) if overrides else config
    steps, epochs = config.learner.steps, config.task.epochs
    if wanted.learner.steps < steps:
        given = f"--set learner.steps={wanted.learner.steps}"
        raise LaunchError(
            f"{given}: the run began with {steps} steps; they may only be raised. To end it at an earlier step: "
            f"asyncrl fork {config.run} --at STEP NEW --set learner.steps=STEP"
        )
    if wanted.task.epochs != epochs and not 0 < epochs <= (wanted.task.epochs or epochs):
        given = f"--set task.epochs={wanted.task.epochs}"
        raise LaunchError(f"{given}: the run began with {epochs}; it may be raised, 0 is no end")
    _check_batch_groups(config, wanted)
    if bool(wanted.gateway.count) != bool(config.gateway.count):
        given = f"--set gateway.count={wanted.gateway.count}"
        raise LaunchError(f"{given}: the run began with {config.gateway.count}; from or to 0 only in a fork")
    for name in {*all_filters(config)} & {*all_filters(wanted)}:
        if getattr(wanted.learner.filter_options, name, None) != getattr(config.learner.filter_options, name, None):
            given = f"learner.filter_options.{name}"
            raise LaunchError(f"--set {given}: the filter is on, and groups were dropped by its options; keep them")
    if has_critic(config) and not has_critic(wanted):
        raise LaunchError("the run has a critic, which unfinished batches still need; fork it to change the advantage")
    return wanted


def _check_computed(config: Config, base: Path) -> list[Finding]:
    """Find what this machine and the model lack for steps that are computed so."""
    return [*trainer_kind(config.learner.trainer).preflight(config, base), *check_machine(config)]


def _check_batch_groups(config: Config, wanted: Config) -> None:
    """Refuse batches that leave groups over, which were issued for larger ones, and levels that no log explains."""
    was, now = config.buffer.batch_groups, wanted.buffer.batch_groups
    if now < was:
        raise LaunchError(f"--set buffer.batch_groups={now}: the run has {was}; it may be raised, or lowered in a fork")
    if now > was and any(task.curriculum.option for task in tasks_of(config).values()):
        raise LaunchError("--set buffer.batch_groups: the levels of the curriculum follow from it; fork the run")


async def request_skip(bus: Bus, origin: int, step: int) -> None:
    """Ask the learner of a run to end a batch without training on it.

    Args:
        origin: step of the weights before the first batch.

    Raises:
        LaunchError: it is trained already, or not packed yet.
    """
    last_trained, last_packed = await newest_message(bus, BATCH_TRAINED), await newest_message(bus, BATCH_PACKED)
    trained = origin if last_trained is None else last_trained[0].step
    packed = origin if last_packed is None else last_packed[0].step
    if not trained < step <= packed:
        waiting = f"batches {trained + 1} to {packed} wait to be trained" if trained < packed else "no batch waits"
        raise LaunchError(f"--skip-batch {step}: batches up to {trained} are trained, and {waiting}")
    await publish(bus, SkipRequested(step))
