"""The objective of a step, from the settings: the buffer records it, and a replay makes another."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.algorithms.filters import filtered_by
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.schedules import learning_rate_factor
from asyncrl.config.settings import Config
from asyncrl.config.tasks import tasks_of
from topics.batches import BatchPacked, Objective


def objective_of(config: Config, step: int) -> Objective:
    """The objective of a step: a pure function of the settings."""
    learner, warmup = config.learner, config.warmup
    optimizer: dict[str, Any] = {
        "max_grad_norm": learner.max_grad_norm,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
    }
    if step <= 0:
        number = step + warmup.steps
        rate = warmup.lr * learning_rate_factor(number, kind="constant", warmup_steps=warmup.lr_warmup_steps)
        return Objective(loss="sft", learning_rate=rate, **optimizer)
    factor = learning_rate_factor(
        step, kind=learner.schedule, warmup_steps=learner.lr_warmup_steps, total_steps=learner.steps
    )
    loss = LOSSES[learner.loss](**learner.loss_options)
    return Objective(
        loss=learner.loss,
        loss_options=msgspec.to_builtins(loss),
        filters=learner.filters,
        aggregation=learner.aggregation,
        constant_tokens=config.rollout.max_new_tokens,
        learning_rate=learner.lr * factor,
        **optimizer,
    )


def with_other_settings(packed: BatchPacked, was: Config, now: Config) -> BatchPacked:
    """A batch whose objective and estimators differ from the recorded ones where two configs differ.

    Groups that a filter drops which the run did not have are left out.
    """
    old, new = (msgspec.structs.asdict(objective_of(config, packed.step)) for config in (was, now))
    changed = {name: value for name, value in new.items() if value != old[name]}
    groups = packed.groups
    others = {
        name: task.advantage for name, task in tasks_of(now).items() if task.advantage != tasks_of(was)[name].advantage
    }
    groups = [msgspec.structs.replace(group, estimator=others.get(group.task, group.estimator)) for group in groups]
    groups = [group for group in groups if not filtered_by(group.members, changed.get("filters", ()))]
    objective = msgspec.structs.replace(packed.objective, **changed)
    return msgspec.structs.replace(packed, objective=objective, groups=groups)
