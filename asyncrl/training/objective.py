"""The training objective: step specification and batch rules, as pure functions of the config and the
batch."""

from __future__ import annotations

import statistics

from asyncrl.algorithms.batches import BatchRules, BatchStats
from asyncrl.algorithms.losses import Correction
from asyncrl.algorithms.schedules import learning_rate_factor
from asyncrl.config.settings import Config
from asyncrl.training.protocol import StepSpec
from topics.batches import BatchPacked


def step_spec(config: Config, step: int) -> StepSpec:
    """The objective of one step: a pure function of the settings."""
    learner, warmup = config.learner, config.warmup
    if step <= 0:
        number = step + warmup.steps
        rate = warmup.lr * learning_rate_factor(number, kind="constant", warmup_steps=warmup.lr_warmup_steps)
        return StepSpec(step=step, loss="sft", learning_rate=rate, grad_clip=learner.max_grad_norm)
    factor = learning_rate_factor(
        step, kind=learner.schedule, warmup_steps=learner.lr_warmup_steps, total_steps=learner.steps
    )
    return StepSpec(
        step=step,
        loss="grpo",
        learning_rate=learner.lr * factor,
        clip=(learner.clip_low, learner.clip_high),
        correction=Correction(
            proximal="current" if learner.correction == "decoupled" else "behaviour",
            mode=learner.correction_mode if learner.correction == "decoupled" else "none",
            cap=learner.correction_cap,
        ),
        grad_clip=learner.max_grad_norm,
    )


def skipped_stats(packed: BatchPacked) -> BatchStats:
    """Return the statistics of a skipped batch: its trajectories, and no token."""
    rewards = [member.reward for group in packed.groups for member in group.members]
    return BatchStats(len(rewards), 0, 0, {}, statistics.fmean(rewards), statistics.pstdev(rewards))


def batch_rules(config: Config, packed: BatchPacked) -> BatchRules:
    """Return how the rows of a batch are weighed and masked."""
    learner = config.learner
    if packed.stage == "warmup":
        return BatchRules(step=packed.step, advantage="none", aggregation="token")
    return BatchRules(
        step=packed.step,
        min_version=packed.min_version,
        advantage=learner.advantage,
        aggregation=learner.aggregation,
        constant_tokens=config.rollout.max_new_tokens,
    )
