"""The objective of a step, from the settings: the buffer records it, and a replay makes another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.filters import filtered_by
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.named import Table
from asyncrl.algorithms.schedules import learning_rate_factor
from asyncrl.config.check_learner import has_critic
from asyncrl.config.learner_settings import CriticSettings, TeacherSettings
from asyncrl.config.live_settings import LiveSettings
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.staged import all_learners, as_in
from asyncrl.config.tasks import every_task, tasks_of
from topics.batches import BatchPacked, CriticStep, Distillation, Hindsight, Objective, Penalty


def objective_of(config: Config, step: int, stage: str = "") -> Objective:
    """The objective of a step: a pure function of the settings.

    Args:
        stage: of `config.stages`, whose objective the step has; "" before the first one.
    """
    learner, warmup = as_in(config, stage).learner, config.warmup
    optimizer: dict[str, Any] = {
        "max_grad_norm": learner.max_grad_norm,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
    }
    if step <= 0:
        number = step + warmup.steps
        rate = warmup.lr * learning_rate_factor(number, kind="constant", warmup_steps=warmup.lr_warmup_steps)
        return Objective(loss="sft", learning_rate=rate, **optimizer)
    loss = LOSSES[learner.loss](**learner.loss_options)
    return Objective(
        stage=stage or None,
        loss=learner.loss,
        loss_options=msgspec.to_builtins(loss),
        filters=learner.filters,
        filter_options=learner.filter_options.of(learner.filters),
        aggregation=learner.aggregation,
        constant_tokens=config.rollout.max_new_tokens,
        columns=learner.columns,
        turn_discount=learner.turn_discount,
        reward_weights=learner.reward_weights,
        whiten=learner.whiten,
        learning_rate=_rate(learner, step),
        reference=_newest_multiple(step - 1, learner.reference.refresh_every),
        penalties=_penalties(learner),
        distillation=_distillation(learner.teacher),
        hindsight=_hindsight(config.live),
        live_kl=bool(config.live.fraction and config.live.safety.kl_bound),
        critic=_critic_step(learner.critic, step - config.critic_origin) if has_critic(config) else None,
        **optimizer,
    )


def algorithms_of(config: Config) -> Iterator[tuple[Table[Any], str]]:
    """Losses and advantages by which objectives are made, each with the table that has it."""
    yield from ((LOSSES, learner.loss) for learner in all_learners(config).values())
    yield from ((ADVANTAGES, task.advantage) for task in every_task(config))


def _newest_multiple(version: int, every: int) -> int:
    return version // every * every if every else 0


def _rate(learner: LearnerSettings, step: int) -> float:
    """Learning rate of a step of RL."""
    schedule, warmup_steps = learner.schedule, learner.lr_warmup_steps
    factor = learning_rate_factor(step, kind=schedule, warmup_steps=warmup_steps, total_steps=learner.steps)
    return learner.lr * factor


def _critic_step(critic: CriticSettings, number: int) -> CriticStep:
    """The step of the critic at this step of RL, counted from its first one."""
    factor = learning_rate_factor(max(number, 1), kind="constant", warmup_steps=critic.lr_warmup_steps)
    return CriticStep(
        discount=critic.discount,
        gae_lambda=critic.gae_lambda,
        value_clip=critic.value_clip,
        learning_rate=critic.lr * factor,
        max_grad_norm=critic.max_grad_norm,
        betas=critic.betas,
        weight_decay=critic.weight_decay,
        alone=number <= critic.warmup_steps,
    )


def _penalties(learner: LearnerSettings) -> list[Penalty]:
    reference, teacher = learner.reference, learner.teacher
    sampled = teacher.coef if teacher.given and not teacher.top_k else 0.0
    found = [("reference", reference.kl_coef, reference), ("teacher", sampled, teacher)]
    return [Penalty(name, coef, how.kl_estimator, how.kl_of == "trainer") for name, coef, how in found if coef]


def _distillation(teacher: TeacherSettings) -> Distillation | None:
    if not (teacher.given and teacher.top_k and teacher.coef):
        return None
    return Distillation(teacher.top_k, teacher.coef, teacher.direction)


def _hindsight(live: LiveSettings) -> Hindsight | None:
    if not live.fraction or live.method == "binary":
        return None
    given = live.hindsight
    return Hindsight(given.w_rl, given.w_opd, given.clip, given.top_k)


def with_other_settings(packed: BatchPacked, was: Config, now: Config) -> BatchPacked:
    """A batch whose objective and estimators differ from the recorded ones where two configs differ.

    Groups that a filter drops which the run did not have are left out.
    """
    stage = packed.objective.stage or ""
    old, new = (msgspec.structs.asdict(objective_of(config, packed.step, stage)) for config in (was, now))
    changed = {name: value for name, value in new.items() if value != old[name]}
    groups = packed.groups
    # An estimator that a stage gave its groups is no task's, and stays.
    others = {
        (name, tasks_of(was)[name].advantage): task.advantage
        for name, task in tasks_of(now).items()
        if not (stage and was.stages[stage].advantage)
    }
    groups = [
        msgspec.structs.replace(group, estimator=others.get((group.task, group.estimator), group.estimator))
        for group in groups
    ]
    if changed.keys() & {"filters", "filter_options"}:
        rules = new["filters"], new["filter_options"]
        groups = [group for group in groups if not filtered_by([*group.before, *group.members], *rules)]
    objective = msgspec.structs.replace(packed.objective, **changed)
    return msgspec.structs.replace(packed, objective=objective, groups=groups)
